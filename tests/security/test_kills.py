"""Twenty kills of whatever a run consists of, at random moments: it goes on to the same end, and nothing is left of any."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.test_resume import SMALL, same_end
from tests.patience import BUSY
from tests.security.endings import Run

NAMED = {
    "controller": "",
    "policy": "Rank 0",
    "rollout": "rollout-0",
    "gcs_server": "Ray's gcs_server",
    "raylet": "Ray's raylet",
}
"""What is killed, and how the message that tells of it names it; a process of a group by the log it writes."""
KILLS = 20
RECIPE = [
    *("quintet", "train", *SMALL, "train.steps=30", "cluster.ranks=1", "cluster.device=cpu"),
    *("rollout.own_processes=true", "resume=auto"),
]


@pytest.mark.nightly
def test_whatever_is_killed_the_run_comes_to_the_same_end(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    began = time.monotonic()
    finish(tmp_path / "whole", tmp_path)
    (whole,) = (tmp_path / "whole").iterdir()
    seconds = time.monotonic() - began
    victims = list(NAMED) * (KILLS // len(NAMED))
    rng.shuffle(victims)
    directories = (tmp_path / f"killed-{number}" for number in itertools.count())
    runs = next(directories)
    for number, kind in enumerate(victims):
        after_s = rng.uniform(0, 0.5 * seconds)
        print(f"{number}: {kind} after {after_s:.1f} s", flush=True)
        while not killed(kind, after_s, runs, tmp_path):  # it had come to its end before that
            same_end(whole, max(runs.iterdir()))
            runs = next(directories)
            after_s = rng.uniform(0, 0.5 * seconds)
    finish(runs, tmp_path)
    same_end(whole, max(runs.iterdir()))
    assert list(tmp_path.glob("quintet-*")) == []


def finish(runs: Path, scratch: Path) -> None:
    run = Run([*RECIPE, f"run.dir={runs}"], scratch)
    assert run.end(within_s=300) == 0, run.said


def killed(kind: str, after_s: float, runs: Path, scratch: Path) -> bool:
    """Start the run, or go on with it, and kill one of its processes some time after that is there; whether it ended so."""
    run = Run([*RECIPE, f"run.dir={runs}"], scratch)
    victim = wait_for(kind, run)
    run.look()
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline and run.process.poll() is None:
        time.sleep(0.01)
    if victim is not None and run.process.poll() is None:
        run.look()
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    code = run.end(within_s=10 if kind in ("gcs_server", "raylet") else 30)
    if code == 0:
        return False
    run.nothing_left(within_s=15)
    if kind == "controller":
        assert (code, run.said.count("error:")) == (-9, 0), run.said
    else:
        assert (code, run.said.count("error:")) == (3, 1), run.said
        assert f"error: {NAMED[kind]}" in run.said, run.said
        assert "Traceback" not in run.said, run.said
    print(f"   {run.said[run.said.find('error:') :].splitlines()[0]}", flush=True)
    return True


def wait_for(kind: str, run: Run) -> psutil.Process | None:
    """The process of that kind, once it is there, and Ray has started; None when the run ends before."""
    me = psutil.Process(run.process.pid)
    deadline = time.monotonic() + 100 * BUSY
    while run.process.poll() is None:
        assert time.monotonic() < deadline, f"no {kind}"
        with suppress(psutil.Error):
            there = me.children(recursive=True)
            if any(one.name().startswith("ray::RankActor") for one in there):
                found = [me] if kind == "controller" else [one for one in there if is_a(kind, one)]
                if found:
                    return found[0]
        time.sleep(0.1)
    return None


def is_a(kind: str, process: psutil.Process) -> bool:
    with suppress(psutil.Error, OSError):
        log = Path(f"/proc/{process.pid}/fd/1").readlink().name
        return process.name() == kind or log.startswith(f"{kind}-")
    return False
