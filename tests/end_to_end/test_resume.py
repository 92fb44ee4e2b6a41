"""Runs that are ended in every way and go on: to the same end as one that was let be."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest

from quintet.runs.checkpoints import MANIFEST, Checkpoints
from quintet.runs.ledger import CLOCK_KEYS
from tests.disks import mounted

ROOT = Path(__file__).parents[2]
SMALL = [
    "recipes/laptop_demo.yaml",
    "model.build.layers=2",
    "model.build.hidden_size=64",
    "reward.function=length",  # an untrained model's answers differ in length, so there is something to learn
    "algorithm.kl_coef=0.01",
    "train.prompts_per_step=8",
    "train.eval_prompts=0",
    "sft.steps=3",
    "sft.optimizer.warmup_steps=1",
    "optimizer.warmup_steps=1",
    "checkpoint.every_steps=1",
]
STEPS = 6
LEFT = ".left"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "quintet", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def run(*arguments: str, code: int = 0) -> str:
    process = start(*arguments)
    output, _ = process.communicate(timeout=1000)
    assert process.returncode == code, output
    return output


def only(directory: Path) -> Path:
    (found,) = directory.iterdir()
    return found


def recorded(directory: Path) -> list[dict]:
    """Everything a run recorded that depends neither on the clock nor on where it was taken up: the first sync of a process
    has none before it to be compared with."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    left_out = (*CLOCK_KEYS, "sync/masters_alone")
    return [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in lines]


def weights(directory: Path) -> str:
    return hashlib.sha256((directory / "checkpoint" / "model.safetensors").read_bytes()).hexdigest()


def same_end(one: Path, other: Path) -> None:
    assert recorded(one) == recorded(other)
    assert (one / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    assert weights(one) == weights(other)


def kill_all(process: subprocess.Popen[str]) -> None:
    """kill -9 of a run and of every process it started."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family, timeout=10)
    process.communicate()


def wait_for_a_save(process: subprocess.Popen[str], runs: Path, count: int = 1, seconds: float = 600) -> Path:
    """Wait until a save of this process begins; of several the count-th."""
    seen = {p for p in runs.glob("*/checkpoints/*") if (p / MANIFEST).exists()}
    for left in set(runs.glob("*/checkpoints/*-*")) - seen:
        (left / LEFT).touch()  # goes with what a predecessor left, when a save of its name begins
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        for path in runs.glob("*/checkpoints/*-*"):
            if path not in seen and not (path / MANIFEST).exists() and not (path / LEFT).exists():
                seen.add(path)
                count -= 1
                if count == 0:
                    return path
        time.sleep(0.001)
    raise AssertionError("no save began")


@pytest.fixture(scope="module")
def straight_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, str]]:
    """A run of so many steps that nothing happened to, by the guide's own command, and what was printed."""

    @cache
    def made(steps: int) -> tuple[Path, str]:
        runs = tmp_path_factory.mktemp("straight")
        output = run(*commands_of_the_guide()[0], *SMALL[1:-1], f"train.steps={steps}", f"run.dir={runs}")
        return only(runs), output

    return made


@pytest.fixture(scope="module")
def straight(straight_of: Callable[[int], tuple[Path, str]]) -> Path:
    return straight_of(STEPS)[0]


def commands_of_the_guide() -> list[list[str]]:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    return [one.split() for one in re.findall(r"^\$ quintet (train .*)$", page, re.MULTILINE)]


@pytest.mark.nightly
def test_the_commands_of_the_guide(straight_of):
    """Each `quintet train` of docs/checkpoints.md, in order, made short; the second finds nothing left to do."""
    directory, output = straight_of(STEPS)
    assert f"Run finished after {STEPS} steps" in output
    first, again = commands_of_the_guide()
    assert again == [*first, "resume=auto"]
    output = run(*again, *SMALL[1:-1], f"train.steps={STEPS}", f"run.dir={directory.parent}")
    assert f"nothing left to do: {directory} has finished" in output


@pytest.mark.parametrize(
    ("saves", "steps", "of_saves"),
    [
        pytest.param([1, 5], STEPS, 0, marks=pytest.mark.slow),
        pytest.param([1, 1, 2, 1, 1, 2, 1, 1, 1, 2], 16, 3, marks=pytest.mark.nightly),
    ],
    ids=["twice", "ten times"],
)
def test_kill_9_during_a_save_at_random_moments(straight_of, tmp_path, saves, steps, of_saves):
    """Whenever it is killed, what was published loads, and the run comes to the same end as if nothing had happened.

    saves: of each start, the save that is cut off; with three SFT steps, the last is a save of RL.
    """
    rng, unfinished, last = random.Random(0), 0, (0, 0)
    arguments = ["train", *SMALL, f"train.steps={steps}", f"run.dir={tmp_path}", "resume=auto"]
    for count in saves:
        process = start(*arguments)
        path = wait_for_a_save(process, tmp_path, count)
        time.sleep(rng.choice([0.0, 0.002, 0.01, 0.03, 0.1]))
        kill_all(process)
        unfinished += not (path / MANIFEST).exists()
        newest, _ = Checkpoints(path.parent).latest()
        place = ((0 if newest.manifest.stage == "sft" else 1), newest.manifest.step) if newest else (0, 0)
        assert place >= last
        last = place
    assert path.name.startswith("step-")  # and not "sft-…"
    assert unfinished >= of_saves  # was killed in the middle of one
    run(*arguments)
    same_end(straight_of(steps)[0], max(tmp_path.iterdir()))


@pytest.mark.nightly
def test_a_worker_is_killed_during_a_save_and_what_goes_on_is_stopped_by_sigterm(straight, tmp_path):
    """The stopped run saves, though the recipe asks for no save then, and goes on to the same end."""
    recipe = ["train", *SMALL, f"train.steps={STEPS}", f"run.dir={tmp_path}"]
    process = start(*recipe)
    path = wait_for_a_save(process, tmp_path, 5)
    worker = next(
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if p.name().startswith("ray::RankActor")
    )
    worker.kill()
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 3, output
    assert re.search(
        r"error: Rank \d died in \w+: (killed by SIGKILL|ended without a word: killed from outside)", output
    )
    newest, _ = Checkpoints(path.parent).latest()
    assert newest is not None

    recipe += ["checkpoint.every_steps=100", "checkpoint.async_save=false"]
    process = start(*recipe, "resume=auto")
    assert process.stdout is not None
    before = ""
    for line in process.stdout:
        before += line
        if re.match(rf"\s+\d+/{STEPS} ", line):
            break
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=400)
    assert f"going on after {newest.manifest.stage} step {newest.manifest.step}" in before
    assert process.returncode == 143, output
    said = re.search(
        r"quintet: stopped after rl step (\d+), as SIGTERM asked; go on with resume=(\S+)", output
    )
    assert said, output
    assert json.loads((Path(said[2]) / "summary.json").read_text())["status"] == "interrupted"

    (told,) = re.findall(r"^to go on +quintet (.*)$", output, re.MULTILINE)
    again = run(*shlex.split(told))
    assert f"going on after rl step {said[1]}, from {said[2]}/checkpoints/step-0000" in again
    same_end(straight, only(tmp_path))
    assert len(json.loads((only(tmp_path) / "summary.json").read_text())["starts"]) == 3
    assert "nothing left to do" in run(*recipe, "resume=auto")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One or two checkpoints fit, then write() fails with ENOSPC."""
    with mounted(tmp_path / "disk", "8m") as disk:
        yield disk


@pytest.mark.slow
def test_a_disk_that_fills_during_a_save(straight, small_disk):
    """Somebody else fills the disk while the ranks write; the check before the save saw room. The run stops; once there is room
    it goes on, and when it happens again it trains to the end, as it is told to then."""
    runs = small_disk / "runs"
    recipe = ["train", *SMALL, f"train.steps={STEPS}", f"run.dir={runs}"]
    process = start(*recipe, "checkpoint.on_error=stop")
    wait_for_a_save(process, runs, 4)
    output = filled(process, small_disk, only(runs))
    assert process.returncode == 2, output
    assert "Make room" in output
    (small_disk / "filler").unlink()
    newest, _ = Checkpoints(only(runs) / "checkpoints").latest()
    assert newest is not None

    process = start(*recipe, "checkpoint.on_error=continue", "resume=auto")
    wait_for_a_save(process, runs, 2)
    output = filled(process, small_disk, only(runs))
    assert f"going on after {newest.manifest.stage} step {newest.manifest.step}" in output
    assert "warning: " in output
    assert "Training goes on (checkpoint.on_error=continue)" in output
    one, other = (
        [line for line in recorded(directory) if line["stage"] == "rl" and "loss" in line]
        for directory in (only(runs), straight)
    )
    assert len(one) == STEPS
    assert one == other
    assert (only(runs) / "samples.jsonl").read_text() == (straight / "samples.jsonl").read_text()


def filled(process: subprocess.Popen[str], disk: Path, directory: Path) -> str:
    """Fill the disk now, and return what the run says of it, once it has ended."""
    fill(disk)
    output, _ = process.communicate(timeout=400)
    failed = re.search(
        r"(\S+/checkpoints/step-\d+) was not saved: (.+) \(needed: about ([\d.]+ \w+), free there: ([\d.]+ \w+)\); the last whole "
        r"checkpoint is (\S+)",
        " ".join(output.split()),
    )
    assert failed, output
    newest, _ = Checkpoints(directory / "checkpoints").latest()
    assert newest is not None
    assert not Path(failed[1]).exists() or Path(failed[1]) == newest.path
    return output


def fill(disk: Path) -> None:
    """Leave no more than the run's own small files need."""
    free = shutil.disk_usage(disk).free
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        file.write(b"x" * max(0, free - 300_000))


OF_PPO = [
    *("algorithm.name=ppo", "algorithm.kl_coef=0.01", "algorithm.kl_in=reward", "critic.warmup_steps=1"),
    *("train.mini_batches_per_step=2", "engine.offload_optimizer=1"),
    *(
        "checkpoint.every_steps=100",
        "checkpoint.async_save=false",
    ),  # roles take turns: each is written before it leaves
    "rollout.own_processes=true",  # so that weights travel, and their masters are looked at right after loading
]


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", [OF_PPO, []], ids=["ppo", "grpo"])
def test_verify_resume_proves_it(tmp_path, algorithm):
    recipe = [*SMALL[:-1], f"run.dir={tmp_path}", "cluster.ranks=1", *algorithm]
    output = run("verify-resume", *recipe, "--steps", "2")
    assert "identical: every step and every weight, bit for bit" in output
    assert re.search(r"resumed\s+rl 3 .*the same", output)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_verify_resume_in_another_layout(tmp_path):
    recipe = [*SMALL[:-1], f"run.dir={tmp_path}"]
    output = run("verify-resume", *recipe, "--steps", "2", "--layout", "layout.tp=2")
    assert (
        "the same up to rounding: what was loaded is what was saved, bit for bit; in the other layout"
        in output
    )


@pytest.mark.nightly
def test_refills_are_resumed_too(tmp_path):
    recipe = [*SMALL[:-1], f"run.dir={tmp_path}", "algorithm.name=dapo", "cluster.ranks=1"]
    output = run("verify-resume", *recipe, "reward.overlong_tokens=2", "--steps", "2")
    assert "identical: every step and every weight, bit for bit" in output
