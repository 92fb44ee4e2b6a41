"""The whole system as a user starts it: commands, run directories, interrupts, bad files."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from quintet.cli import main
from quintet.controller.replay import pack, read, replay_file
from quintet.runs.ledger import CLOCK_KEYS, read_jsonl
from tests.metrics_page import undocumented
from tests.patience import BUSY
from tests.train.runs import TINY

ROOT = Path(__file__).parents[2]
DEMO = [
    "recipes/laptop_demo.yaml",
    "train.steps=2",
    "train.prompts_per_step=8",
    "train.eval_prompts=8",
    "train.eval_samples_per_prompt=2",
    "sft.steps=4",
    "model.build.layers=2",
    "model.build.hidden_size=64",
]

SAVES = ["checkpoint.every_steps=1", "checkpoint.keep_last=9", "checkpoint.hf_every_steps=2"]


def command(*arguments: str, stderr: int = subprocess.STDOUT, **extra) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "quintet", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        **extra,
    )


def run(*arguments: str, code: int = 0, timeout_s: float = 280) -> str:
    process = command(*arguments)
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == code, output
    return output


def run_directory(output: str) -> Path:
    found = re.search(r"^run directory\s+(\S+)$", output, re.MULTILINE)
    assert found, output
    return ROOT / found[1]


def metrics(directory: Path, stage: str) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == stage]


@pytest.fixture(scope="module")
def resharded(tmp_path_factory) -> tuple[Path, str]:
    """The demo at two steps, trained on tp 2 and generating on dp 2: the run directory and what was printed."""
    output = run("train", *DEMO, *SAVES, "layout.tp=2", f"run.dir={tmp_path_factory.mktemp('runs')}")
    return run_directory(output), output


@pytest.mark.timeout(600)
def test_run_directory_is_complete(resharded):
    directory, output = resharded
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 2
    steps = [line for line in metrics(directory, "rl") if "loss" in line]
    assert not [line for line in metrics(directory, "sft") if "seconds/start" in line]
    assert summary["tokens_trained"] == sum(line["tokens_trained"] for line in steps) > 0
    warm_up = metrics(directory, "sft")
    assert summary["sft_tokens_trained"] == sum(line["tokens_trained"] for line in warm_up) > 0
    for key in ("eval_before", "eval_after", "greedy_before", "greedy_after"):
        assert 0 <= summary[key] <= 1
    phases = {"start", "sft", "evaluate", "generate", "reward", "scatter", "logprob", "train", "sync", "save"}
    assert phases <= set(summary["seconds_by_phase"])
    assert summary["seconds_total"] >= sum(summary["seconds_by_phase"].values()) - 0.01
    for name in ("recipe.yaml", "samples.jsonl", "report.html"):
        assert (directory / name).stat().st_size > 0
    assert "accuracy, sampled" in output
    assert str(directory / "report.html") in output


def test_the_first_answers_come_before_any_training(resharded):
    _, output = resharded
    looks = re.findall(r"^before training: '\d+\+\d+=' is answered by '[^']+'(?: …)?$", output, re.MULTILINE)
    assert len(looks) == 2
    assert output.index("layers: portable") < output.index(looks[0]) < output.index("warm-up (SFT)")


def test_every_metric_is_on_the_page(resharded):
    directory, _ = resharded
    told = {name for stage in ("sft", "rl") for line in metrics(directory, stage) for name in line}
    assert len(told) > 40
    assert not undocumented(told)


def test_a_run_shorter_than_its_warm_ups_says_so(resharded):
    _, output = resharded
    assert "optimizer.warmup_steps=10 is more than the 2 optimizer steps there are; shortened to 2." in output
    assert (
        "sft.optimizer.warmup_steps=20 is more than the 4 optimizer steps there are; shortened to 4."
        in output
    )
    assert "Algorithm: grpo, clip_low=0.2" in output


@pytest.mark.slow
def test_dr_grpo_after_a_warm_up_on_a_file_of_its_own(tmp_path):
    """On rows of other columns for held-out prompts, some of them too long."""
    train = [{"prompt": f"1{i}+2{j}=", "answer": str(30 + i + j)} for i in range(9) for j in range(9)]
    held_out = [{"q": row["prompt"], "a": row["answer"]} for row in train[:8]] + [{"q": "1+" * 40, "a": "0"}]
    worked = [{"prompt": row["prompt"], "response": row["answer"]} for row in train]
    for name, rows in (("train", train), ("held_out", held_out), ("worked", worked)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [
        f"data.{side}_path={tmp_path}/{name}.jsonl"
        for side, name in (("train", "train"), ("eval", "held_out"))
    ]
    paths += [f"data.sft_path={tmp_path}/worked.jsonl", "data.eval_prompt_key=q", "data.eval_answer_key=a"]
    task = [
        "data.task=jsonl",
        "data.task_options={}",
        "data.long_prompts=drop",
        "reward.function=exact_match",
    ]
    output = run("train", *DEMO, *task, *paths, "algorithm.name=dr_grpo", f"run.dir={tmp_path}/runs")
    assert "aggregation=fixed_length, normalize_by_std=false" in output
    assert "1 of 9 prompts in" in output
    directory = run_directory(output)
    sft, rl = metrics(directory, "sft"), [one for one in metrics(directory, "rl") if "loss" in one]
    assert [len(sft), len(rl)] == [4, 2]
    assert sft[-1]["loss"] < sft[0]["loss"]
    assert not undocumented({name for line in (*sft, *rl) for name in line})


def test_steps_are_recorded_in_full(resharded):
    directory, _ = resharded
    steps = [line for line in metrics(directory, "rl") if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    wanted = {"reward/mean", "response_tokens/mean", "mismatch/kl_k3", "grad_norm", "lr", "tokens_per_s"}
    wanted |= {"seconds/generate", "seconds/train", "memory/host_gib", "entropy", "well_formed"}
    weights = directory / "checkpoint" / "model.safetensors"
    for line in steps:
        assert wanted <= set(line)
        # To each of the two whole copies; a file has a header, and a tied head once.
        assert line["sync/gib"] * 2**30 == pytest.approx(2 * weights.stat().st_size, rel=0.1)
        # Rollout (dp 2) and trainer (tp 2) hold the same weights: fp32 rounding is all that parts them.
        assert abs(line["mismatch/kl_k3"]) < 1e-9
        assert line["mismatch/logprob_gap_max"] < 1e-4
        assert 0 < line["tokens_trained"] < line["tokens"]
        # Ranks alone: the controller's and Ray's processes are not in it.
        assert 0 < line["memory/host_gib"] < 8
        for phase in ("generate", "train", "sync"):
            assert 0 < line[f"memory/{phase}_host_gib"] <= 1.05 * line["memory/host_gib"]
        replay = read(replay_file(directory, line["step"]))
        logged = [one for one in read_jsonl(directory / "samples.jsonl") if one["step"] == line["step"]]
        shown = [one for one in logged if one["kind"] == "train"]
        assert len({one["prompt"] for one in shown}) == len(shown) == 4
        assert (replay.samples[0].prompt, replay.samples[0].response) == (
            shown[0]["prompt"],
            shown[0]["response"],
        )
        held_out = [one["kind"] for one in logged if one["kind"] != "train"]
        assert held_out == (["eval"] * 4 + ["greedy"] * 4 if line["step"] == 2 else [])
        for sample in replay.samples:
            made, trained = sample.generated, sample.trained
            assert (made.ids, made.prompt_tokens) == (trained.ids, trained.prompt_tokens)
            assert made.logprobs == pytest.approx(trained.rollout_logprobs, abs=1e-6)
            assert made.logprobs == pytest.approx(trained.old_logprobs, abs=1e-4)
    (first, *_) = [line for line in metrics(directory, "rl") if "eval/accuracy" in line]
    assert first["memory/host_gib"] > 0
    assert not [key for key in first if key.startswith("eval/memory")]


def test_checkpoint_loads_in_transformers_and_generates_the_same(resharded):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, _ = resharded
    model = AutoModelForCausalLM.from_pretrained(directory / "checkpoint", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory / "checkpoint")
    prompt = "123+456="
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    process = command(
        "generate",
        "recipes/laptop_demo.yaml",
        "model.build=null",
        f"model.path={directory / 'checkpoint'}",
        "sft=null",
        "cluster.ranks=1",
        "rollout.temperature=0",
        "rollout.samples_per_prompt=1",
        f"run.dir={directory / 'generate'}",
        "run.trackers=[tensorboard]",
        "--prompt",
        prompt,
        stderr=subprocess.PIPE,
    )
    output, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    (line,) = [json.loads(x) for x in output.splitlines()]  # nothing but samples on standard output
    assert "starting 1 rank: in" in said
    assert "_symbolic_trace" not in said
    assert not (directory / "generate").exists()
    # Greedy: the sampling distribution is certain of each token, the model is not.
    assert line["logprob"] == 0
    made = torch.cat((ids, theirs[:, ids.shape[1] :]), dim=1)[:, : ids.shape[1] + line["response_tokens"]]
    with torch.no_grad():
        scores = model(made).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    expected = float(scores.gather(1, made[0, ids.shape[1] :, None]).sum())
    assert line["raw_logprob"] == pytest.approx(expected, abs=1e-4)
    assert line["response"] == tokenizer.decode(theirs[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_resumed_and_with_rollouts_of_their_own(resharded, tmp_path):
    """A copy of the run goes on in the middle of its warm-up, in new processes, with rollouts in their own, for which all of
    training's memory is given up, to the same numbers and weights."""
    directory, _ = resharded
    again = tmp_path / directory.name
    shutil.copytree(directory, again)
    offload = [f"engine.offload_{part}" for part in ("params=1", "grads=1", "optimizer=0.5")]
    offload.append("rollout.own_processes=true")
    resume = f"resume={again / 'checkpoints' / 'sft-000002'}"
    output = run("train", *DEMO, *SAVES, *offload, resume, "layout.tp=2")
    assert f"going on after sft step 2, from {again}/checkpoints/sft-000002" in output
    assert "step-000002, step-000001, sft-000004, sft-000003" in output
    for stage in ("sft", "rl"):
        first, second = ([line for line in metrics(d, stage) if "loss" in line] for d in (directory, again))
        for a, b in zip(first, second, strict=True):
            same = {key for key in a.keys() & b.keys() if not key.startswith((*CLOCK_KEYS, "sync/gib"))}
            if stage == "rl":  # a source counts what aligns the pieces of its buckets, too
                assert a["sync/gib"] == pytest.approx(b["sync/gib"], rel=0.01)
            assert {"loss", "grad_norm"} <= same
            assert {key: a[key] for key in same} == {key: b[key] for key in same}
        assert len(first) >= 2
        assert all(math.isfinite(line["loss"]) for line in first)
    weights = [(d / "checkpoint" / "model.safetensors").read_bytes() for d in (directory, again)]
    assert weights[0] == weights[1]
    for aside in (
        "checkpoints/step-000002/manifest.json",
        "hf/step-000002/config.json",
        "checkpoint/config.json",
    ):
        assert (again / "set_aside" / "1" / aside).exists()
    assert {p.name for p in (again / "hf").iterdir()} == {"sft-000002", "sft-000004", "step-000002"}
    assert (again / "hf" / "step-000002" / "model.safetensors").read_bytes() == weights[0]
    assert len(json.loads((again / "summary.json").read_text())["starts"]) == 2
    for line in [line for line in metrics(again, "rl") if "loss" in line]:
        assert 0 < line["sync/gib"] < line["memory/host_gib"]
        assert line["sync/proof_seconds"] > 0
    earlier, whole = ((d / "logs" / "hybrid.log").read_text() for d in (directory, again))
    assert whole.startswith(earlier)  # the copied run's
    events = [line[41:] for line in whole.removeprefix(earlier).splitlines()]
    docs = (ROOT / "docs" / "hybrid.md").read_text()
    shown = re.findall(r"^ +[\d.]+ s .{26}  (.*)$", docs.split("A separate rollout")[0], re.MULTILINE)
    first = ["training state left: grads, optimizer, params", "rollouts started", *shown[-3:-1]]
    # Evaluation, two steps, evaluation, samples for replay. A fresh optimizer has no state before its first step, and what comes
    # beside something else is told after that.
    assert events == first + shown[:-1] * 2 + shown * 2 + shown[:-1]


@pytest.mark.nightly
@pytest.mark.parametrize("own", ["false", "true"])
def test_what_overlaps_changes_no_bit(tmp_path, own):
    """Two updates a step, with rollouts on the trainer's weights and in processes of their own."""
    weights = []
    for overlaps in ("false", "true"):
        keys = [f"engine.overlap_{what}={overlaps}" for what in ("grad_reduce", "param_gather")]
        keys += [
            f"rollout.own_processes={own}",
            "train.mini_batches_per_step=2",
            f"run.dir={tmp_path / overlaps}",
        ]
        said = run(
            "train", DEMO[0], *TINY, "train.prompts_per_step=8", "train.steps=2", "cluster.ranks=2", *keys
        )
        weights.append((run_directory(said) / "checkpoint" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.nightly
def test_ctrl_c_leaves_nothing_behind_but_a_readable_run(tmp_path):
    recipe = [DEMO[0], *TINY, "train.prompts_per_step=4", "train.steps=10000", f"run.dir={tmp_path}"]
    process = command("train", *recipe, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(r"\s+\d+/10,?000 ", line):
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    output, _ = process.communicate(timeout=60 * BUSY)
    assert time.monotonic() - began < 5 * BUSY
    assert process.returncode == 130
    assert "Ctrl-C: the run ends after this step; once more ends it at once" in output
    assert re.search(
        r"quintet: stopped after rl step \d+, as Ctrl-C asked; the policy is in \S+/checkpoint, ", output
    )
    assert re.search(r"^trained model   \S+/checkpoint$", output, re.MULTILINE)
    _, alive = psutil.wait_procs(family, timeout=3 * BUSY)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    (directory,) = tmp_path.iterdir()
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["steps"] >= 1
    assert (directory / "report.html").exists()
    assert (directory / "checkpoint" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "".join('{"prompt": "1+1=", "answer": "2"}\n' for _ in range(16)) + '{"prompt": "1+',
            "prompts.jsonl:17",
        ),
        ('{"prompt": "1+1=", "answer": "2"}\n{"question": "1+1="}\n', "prompts.jsonl:2"),
        ("", "prompts.jsonl"),
        (json.dumps({"prompt": "1" * 40, "answer": "1"}) + "\n", "prompts.jsonl:1"),
    ],
    ids=["bad-json", "missing-column", "empty", "too-long"],
)
def test_a_malformed_prompt_file_is_named_before_anything_starts(
    tmp_path, monkeypatch, capsys, content, said
):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    monkeypatch.chdir(ROOT)
    code = main([
        "train", *(x for x in DEMO if not x.startswith("sft.")), "sft=null", "data.task=jsonl", "data.task_options={}", f"data.train_path={file}",
        f"data.eval_path={file}", "reward.function=exact_match", f"run.dir={tmp_path / 'runs'}",
    ])  # fmt: skip
    output = "".join(capsys.readouterr())
    assert code == 2, output
    assert said in output
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_reward_that_fails_ends_the_run_with_the_sample_or_counts_as_0(
    ray_cluster, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\ndef reward(prompt, response, answer):\n    if 'made up' in response: return 0\n    print('at', prompt)\n"
        "    if os.path.exists(mark): os._exit(9)\n"
        "    open(mark, 'w').close()\n    raise ValueError(f'no reward for {response}')\n"
        f"mark = {str(tmp_path / 'mark')!r}\n"
    )
    recipe = ["train", "recipes/laptop_demo.yaml", *TINY, "cluster.ranks=1", "train.steps=1"]
    recipe += ["train.prompts_per_step=2", f"reward.function={file}:reward"]
    assert main([*recipe, f"run.dir={tmp_path / 'stop'}"]) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"error: sample \d+, '.*', to addition train problem \d+: reward \S+mine\.py:reward ", said
    )
    (tmp_path / "mark").unlink(missing_ok=True)

    assert main([*recipe, "reward.on_error=zero", f"run.dir={tmp_path / 'zero'}"]) == 0
    said = "".join(capsys.readouterr())
    (directory,) = (tmp_path / "zero").iterdir()
    (line,) = [line for line in metrics(directory, "rl") if "loss" in line]
    assert (line["reward/failed"], line["reward/timed_out"], line["reward/mean"]) == (4, 0, 0)
    assert f"step 1: reward {file}:reward: 4 of 4 responses could not be scored and got 0" in said
    assert "at " in "".join(log.read_text() for log in (directory / "logs").glob("reward-*.log"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_adapters_learn_and_stand_for_themselves(ray_cluster, tmp_path, monkeypatch):
    """A model made by SFT, then trained by adapters alone: they learn, `eval` takes them up from adapter/, and the merged model
    says the same."""
    monkeypatch.chdir(ROOT)
    sums = ["data.task_options={digits: 1, min_digits: 1}", "sft.samples_per_step=32"]
    one = ["cluster.ranks=1", f"run.dir={tmp_path / 'base'}"]
    assert main(["sft", *DEMO[:1], *DEMO[-2:], *sums, *one, "sft.steps=60"]) == 0
    (base,) = (tmp_path / "base").iterdir()
    rest = ["recipes/laptop_demo.yaml", "model.build=null", *sums]
    rest += ["train.eval_prompts=32", "train.eval_samples_per_prompt=8", "train.prompts_per_step=16"]
    learn = [
        "sft.steps=80",
        "sft.stop_at_loss=null",
        "sft.optimizer.lr=0.01",
        "lora.rank=8",
        "train.steps=6",
    ]
    learn += ["optimizer.lr=0.003", "optimizer.warmup_steps=2", "algorithm.kl_coef=0.01", "layout.tp=2"]
    learn.append(f"run.dir={tmp_path / 'trained'}")
    assert main(["train", *rest, f"model.path={base}/checkpoint", *learn]) == 0
    (trained,) = (tmp_path / "trained").iterdir()
    losses = [line["loss"] for line in metrics(trained, "sft")]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    steps = [line for line in metrics(trained, "rl") if "loss" in line]
    assert steps[0]["kl/reference"] == pytest.approx(0, abs=1e-5)  # what RL starts from is after the warm-up
    assert max(line["kl/reference"] for line in steps) > 1e-4
    assert max(line["mismatch/logprob_gap_max"] for line in steps) < 1e-4

    def evaluated(*model: str, apart: bool = False) -> dict[str, float]:
        file = tmp_path / "results.json"
        arguments = ["eval", *rest, "sft=null", "cluster.ranks=1", *model, "--output", str(file)]
        if apart:
            run(*arguments, timeout_s=600)
        else:
            assert main(arguments) == 0
        return json.loads(file.read_text())

    beside = evaluated(f"model.path={base}/checkpoint", f"lora.path={trained}/adapter")
    assert beside == evaluated(f"model.path={trained}/checkpoint", apart=True)
    (*_, last) = [line for line in metrics(trained, "rl") if "eval/accuracy" in line]
    assert {"accuracy", "greedy", "response_tokens", "well_formed"} <= beside.keys()
    assert beside == {name: last[f"eval/{name}"] for name in beside}
    (first, *_) = [line for line in metrics(trained, "rl") if "eval/accuracy" in line]
    assert beside != {name: first[f"eval/{name}"] for name in beside}  # of the adapters before RL


@pytest.mark.nightly
def test_a_run_that_agrees_and_one_that_does_not_are_diagnosed(resharded, ray_cluster, tmp_path, capsys):
    """The trainer on tp 2, the rollout on dp 2; then with the rollout's log-probs one token late."""
    run_of = tmp_path / "run"
    shutil.copytree(resharded[0], run_of)
    assert main(["diagnose", "mismatch", str(run_of)]) == 0
    output = capsys.readouterr().out
    assert "Step 3, 4 samples" in output  # of the trained model
    assert "Rollout and trainer agree" in output
    for line in (
        "recorded: rollout ↔ trainer",
        "engine in its layout, now",
        "now: rollout's scores ↔ engine's",
    ):
        assert re.search(rf"{line}.* agree *$", output, re.MULTILINE), output
    replay = read(replay_file(run_of, 2))
    for sample in replay.samples:
        for numbers in (sample.generated.logprobs, sample.trained.rollout_logprobs):
            numbers[:] = [numbers[0], *numbers[:-1]]
    replay_file(run_of, 2).write_bytes(pack(replay))
    output = run("diagnose", "mismatch", str(run_of), "--step", "2", code=4)
    assert (
        "They part at: tokens. The rollout's log-probs are those of the token one position before" in output
    )
