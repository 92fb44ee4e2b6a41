"""Runs that train layers for multi-token prediction: what they log, send and save."""

from __future__ import annotations

import pytest
import torch

from quintet.models import read_shape
from tests.end_to_end.test_train import DEMO, metrics, run, run_directory
from tests.engine.moe_models import stored

MIMO = [
    *("model.build.family=mimo", "model.build.tied_embeddings=false", "mtp.init_layers=1", "layout.pp=2"),
    *("algorithm.kl_coef=0.01", "train.mini_batches_per_step=2"),
]


@pytest.mark.slow
def test_layers_learn_in_sft_and_in_rl_and_are_saved(tmp_path):
    """On two stages, of which the last has a copy of the embedding, beside a reference policy that has no layers."""
    rollout = "rollout.layout={tp: 2}"
    directory = run_directory(run("train", *DEMO, *MIMO, rollout, f"run.dir={tmp_path}", "sft.steps=12"))
    tuned, steps = metrics(directory, "sft"), [m for m in metrics(directory, "rl") if "loss" in m]
    for line in (*tuned, *steps):
        assert line["mtp/loss_1"] > 0
        assert line["mtp/grad_norm"] > 0
        assert 0 <= line["mtp/accuracy_1"] <= 1
    assert tuned[-1]["mtp/loss_1"] < 0.9 * tuned[0]["mtp/loss_1"]
    assert read_shape(directory / "checkpoint").mtp_layers == 1
    before, after = (stored(directory / name) for name in ("model", "checkpoint"))
    assert before.keys() == after.keys()
    assert not [n for n in after if "mtp_layers" in n and torch.equal(before[n], after[n])]


@pytest.mark.nightly
def test_runs_with_layers_resume_bit_for_bit(tmp_path):
    """By a rollout on the engine's own weights, which has no use for the layers."""
    said = run("verify-resume", *DEMO, *MIMO, "rollout.layout=null", f"run.dir={tmp_path}")
    assert "identical: every step and every weight, bit for bit" in said


@pytest.mark.slow
def test_a_rollout_of_its_own_gets_the_layers_and_mismatch_is_diagnosed(tmp_path):
    """By a rollout that proves all that it is sent, and by plain models of the run's checkpoint and model."""
    own = ["layout=null", "rollout.own_processes=true", "checkpoint.every_steps=1", "sft=null"]
    directory = run_directory(run("train", *DEMO, *MIMO, *own, f"run.dir={tmp_path}"))
    said = run("diagnose", "mismatch", str(directory))
    assert "rollout" in said


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_trained_layers_keep_their_acceptance_and_others_lose_theirs(tmp_path, seed):
    """By vLLM's own counter, at temperature 1, on the demo: after SFT, and after 60 steps of GRPO from there with each of the two."""
    built = ["model.build.family=mimo", "model.build.tied_embeddings=false", "mtp.init_layers=1"]
    built += [f"run.seed={seed}"]
    tuned = run_directory(run("sft", DEMO[0], *built, f"run.dir={tmp_path}/sft", timeout_s=1200))
    rl = [
        *("model.build=null", f"model.path={tuned / 'checkpoint'}", "sft=null", "train.steps=61"),
        *("train.eval_prompts=0", "cluster.ranks=1", "rollout.backend=vllm", "rollout.draft_tokens=1"),
        *("rollout.memory_fraction=0.1", f"run.seed={seed}"),
    ]

    def accepted(train: str) -> list[float]:
        """Of each ten steps' drafted tokens, after those of the first step."""
        own = [f"mtp.train={train}", f"run.dir={tmp_path}/{train}"]
        lines = metrics(run_directory(run("train", DEMO[0], *rl, *own, timeout_s=1200)), "rl")
        steps = [m for m in lines if "loss" in m]
        counted = [(m["rollout/accepted_fraction"], m["rollout/draft_tokens"]) for m in steps]
        assert len(counted) == 61
        parts = [counted[:1], *(counted[at : at + 10] for at in range(1, 61, 10))]
        return [sum(f * n for f, n in part) / sum(n for _, n in part) for part in parts]

    trained, kept = accepted("true"), accepted("false")
    assert trained[0] == kept[0] >= 0.7
    assert trained[-1] >= 0.7
    assert all(b <= a + 0.01 for a, b in zip(trained, kept, strict=True)), (trained, kept)
