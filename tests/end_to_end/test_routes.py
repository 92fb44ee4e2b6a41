"""Runs of a small mixture of experts that replay routes: by rollouts of other layouts and other engines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from quintet.controller.replay import pack, read, replay_file
from tests.end_to_end.test_train import DEMO, metrics, run, run_directory

REWARD = """def score(prompt, response, answer):
    return float(len(response) + response.count("1"))
"""
"""Of which an untrained model gets some: its updates are not nothing."""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The demo on two ranks, with a model of three layers of eight experts."""
    path = tmp_path_factory.mktemp("moe") / "reward.py"
    path.write_text(REWARD)
    layout = ["layout.tp=2", "layout.sp=true", "layout.ep=2", "layout.etp=1", "rollout.layout={tp: 1}"]
    how = ["optimizer={lr: 2e-3, warmup_steps: 0}", "train.mini_batches_per_step=2"]
    own = ["model.build.family=qwen3_moe", "model.build.layers=3", f"reward.function={path}:score"]
    return [*DEMO, *own, *layout, *how]


def replayed(moe: list[str], path: Path, *how: str) -> list[dict[str, float]]:
    """The lines of a run's steps of RL."""
    return [
        m for m in metrics(run_directory(run("train", *moe, *how, f"run.dir={path}")), "rl") if "loss" in m
    ]


ROLLOUT = ("engine.replay_routes=rollout", "rollout.return_routes=true")


@pytest.mark.slow
def test_updates_replay_the_rollouts_routes(moe, tmp_path):
    """A trainer of tp 2 × ep 2, rollouts of dp 2. The first mini-batch's weights are those that chose: the second's tokens part."""
    steps = replayed(moe, tmp_path, *ROLLOUT)
    assert steps
    for line in steps:
        layers = [line[f"routes/parted_{layer}"] for layer in range(3)]
        assert line["routes/parted"] == pytest.approx(sum(layers) / 3)
        assert 0 < line["routes/parted"] < 0.5
        assert line["mismatch/logprob_gap_max"] < 1e-4


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_mixture_of_experts_learns_with_its_rollouts_routes(tmp_path):
    """The demo's task, in bf16: imitation first, then GRPO by a trainer of tp 2 × ep 2 and rollouts of dp 2. Of the first step's samples,
    which are the same with and without, replay brings the log-probs nearer."""
    built = [
        "model.build.family=qwen3_moe",
        "sft.steps=450",
        "sft.stop_at_loss=0.1",
        f"run.dir={tmp_path}/sft",
    ]
    tuned = run_directory(run("sft", DEMO[0], *built, timeout_s=1200))
    layout = ["layout.tp=2", "layout.sp=true", "layout.ep=2", "layout.etp=1", "rollout.layout={tp: 1}"]
    how = ["model.build=null", f"model.path={tuned / 'checkpoint'}", "sft=null", "model.dtype=bf16", *layout]
    how += ["train.mini_batches_per_step=2"]

    def trained(name: str, *more: str) -> Path:
        return run_directory(run("train", DEMO[0], *how, *more, f"run.dir={tmp_path}/{name}", timeout_s=2400))

    learned = trained("rollout", *ROLLOUT, "train.steps=50")
    summary = json.loads((learned / "summary.json").read_text())
    assert summary["eval_after"] - summary["eval_before"] >= 0.2
    without = trained("null", "train.steps=1", "train.eval_prompts=0")
    told, natural = ([m for m in metrics(one, "rl") if "loss" in m] for one in (learned, without))
    assert all(0 < line["routes/parted"] < 0.1 for line in told)
    first, other = told[0], natural[0]
    assert first["accuracy"] == other["accuracy"]
    assert first["mismatch/logprob_gap_mean"] < other["mismatch/logprob_gap_mean"]
    assert first["mismatch/logprob_gap_max"] <= other["mismatch/logprob_gap_max"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(ROLLOUT, id="rollout"),
        pytest.param(("engine.replay_routes=old",), id="old", marks=pytest.mark.nightly),
    ],
)
def test_runs_that_replay_resume_bit_for_bit(moe, tmp_path, how):
    said = run("verify-resume", *moe, *how, f"run.dir={tmp_path}")
    assert "identical: every step and every weight, bit for bit" in said


@pytest.mark.slow
def test_a_run_that_replays_is_diagnosed_with_its_routes(moe, tmp_path):
    """On two stages; then with other routes in the file, which engine and plain model are told, and nothing recorded is of."""
    stages = ["layout.tp=1", "layout.sp=false", "layout.ep=1", "layout.etp=null", "layout.pp=2"]
    how = [*stages, "model.build.layers=4", f"run.dir={tmp_path}"]
    directory = run_directory(run("train", *moe, *ROLLOUT, *how))
    assert "Rollout and trainer agree" in run("diagnose", "mismatch", str(directory))
    file = replay_file(directory, 3)  # of the trained model
    replay = read(file)
    for sample in replay.samples:
        told = sample.generated.routes
        told[...] = (told + 1 + np.arange(told.shape[1])[:, None]) % 8
    file.write_bytes(pack(replay))
    said = run("diagnose", "mismatch", str(directory), "--step", "3")
    for line in (
        r"recorded trainer ↔ fp32, one rank .* part",
        r"engine in its layout, now ↔ fp32, one rank .* agree",
        r"recorded (trainer|rollout) ↔ other routes, which the model chose by itself .* explains it",  # the farther one
    ):
        assert re.search(rf"^{line} *$", said, re.MULTILINE), said


@pytest.mark.vllm
@pytest.mark.parametrize("restart", [pytest.param("false", marks=pytest.mark.nightly), "true"])
def test_updates_replay_the_routes_of_vllm(moe, tmp_path, restart):
    how = ["rollout.backend=vllm", f"rollout.restart={restart}"]
    for line in replayed(moe, tmp_path, *ROLLOUT, *how):
        assert 0 < line["routes/parted"] < 0.5
        assert line["mismatch/logprob_gap_max"] < 1e-4
