"""A host that is loaded on purpose: what loads it is there for both sides, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest

from benchmarks import engine
from benchmarks.busy import busy
from benchmarks.engine_work import setup_of
from benchmarks.sides import Side
from tests.benchmark_runs import ROOT

PARENT = """
import signal, sys, time
from benchmarks.busy import busy
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with busy(2):
    print(flush=True)
    time.sleep(60)
"""


def spinning(parent: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(parent).children() if "getppid" in " ".join(one.cmdline())]


def used(one: psutil.Process) -> float:
    return one.cpu_times().user


def test_processes_spin_within_the_block_alone() -> None:
    with busy(2):
        found = spinning(os.getpid())
        assert len(found) == 2
        before, until = [*map(used, found)], time.monotonic() + 30
        while time.monotonic() < until and any(
            used(one) < was + 0.1 for one, was in zip(found, before, strict=True)
        ):
            time.sleep(0.05)
        assert all(used(one) >= was + 0.1 for one, was in zip(found, before, strict=True))
    assert not any(one.is_running() for one in found)
    with busy(0):
        assert spinning(os.getpid()) == []


def test_an_error_ends_them() -> None:
    found: list[psutil.Process] = []

    def fail() -> None:
        with busy(2):
            found.extend(spinning(os.getpid()))
            raise RuntimeError("measured nothing")

    with pytest.raises(RuntimeError, match="measured nothing"):
        fail()
    assert len(found) == 2
    assert not any(one.is_running() for one in found)


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_end_of_who_started_them_ends_them(how: int, status: int) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE)
    found: list[psutil.Process] = []
    try:
        assert parent.stdout is not None
        parent.stdout.readline()
        found = spinning(parent.pid)
        assert len(found) == 2
        parent.send_signal(how)
        assert parent.wait(60) == status
        assert psutil.wait_procs(found, timeout=60)[1] == []
    finally:
        parent.kill()
        parent.communicate()
        for one in found:
            with suppress(psutil.NoSuchProcess):
                one.kill()


class Counting(Side):
    """A side without processes that counts how many spin while it answers and ends."""

    def __init__(self, log: list[int]) -> None:
        self.log, self._ranks = log, []

    def _tell(self, command: dict[str, Any]) -> None:
        if command["do"] == "quit":
            self.log.append(len(spinning(os.getpid())))

    def answer(self) -> list[dict[str, Any]]:
        self.log.append(len(spinning(os.getpid())))
        burst = {"steps": [0], "seconds": [1.0], "losses": [1.0], "norms": [1.0], "peak_gib": 0.0}
        return [{**burst, "table": "", "versions": {}, "launch_us": 1.0, "kernels": ""}]


@pytest.mark.parametrize("words", [[], ["--sequential"]])
def test_both_sides_have_them_in_their_turns_and_neither_while_it_starts(monkeypatch, words) -> None:
    args = engine.arguments(["--shape", "tiny", "--busy", "2", *words])
    setup = setup_of("tiny", backend="portable", busy=args.busy)
    assert setup.case() == "tiny/portable/busy-2"
    assert setup_of("tiny", backend="portable").case() == "tiny/portable"
    log: list[int] = []
    monkeypatch.setattr(engine.Turns, "_side", lambda self, name: Counting(log))
    with engine.Turns(setup, list(engine.SIDES), args) as turns:
        turns.take(first=True)
        if not args.sequential:
            turns.profile()
    assert log == ([0, 2, 0] * 2 if words else [0, 0, 2, 2, 2, 2, 0, 0])


@pytest.mark.nightly
def test_a_measurement_that_is_told_to_end_leaves_no_process() -> None:
    words = ["--shape", "tiny", "--busy", "1", "--rounds", "1000", "--only", "quintet"]
    run = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.engine", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert run.stdout is not None
        while "s/step" not in (line := run.stdout.readline()):
            assert line, "it ended"
        started = psutil.Process(run.pid).children()
        assert started
        run.terminate()
        assert run.wait(60) == 143
        assert psutil.wait_procs(started, timeout=60)[1] == []
    finally:
        run.kill()
        run.communicate()
