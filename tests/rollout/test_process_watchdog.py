"""Processes that an engine started do not outlive the one that started them, and are not waited for when they died."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import psutil
import pytest

from quintet.errors import WorkerFailure
from quintet.rollout.process_watchdog import ProcessWatchdog

STARTS = """
import subprocess, sys, time
from quintet.rollout.process_watchdog import ProcessWatchdog
with ProcessWatchdog.over_children("an engine") as watch:
    child = subprocess.Popen(["sleep", "100"])
print(child.pid, watch._reaper.pid, flush=True)
sys.stdin.readline()
watch.close()
print("closed", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("closed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_they_end_with_it_unless_they_are_let_go(closed: bool) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    child, reaper = (psutil.Process(int(pid)) for pid in starter.stdout.readline().split())
    try:
        assert child.is_running()
        if closed:
            starter.stdin.write("\n")
            starter.stdin.flush()
            assert starter.stdout.readline() == "closed\n"
            assert not reaper.is_running()
        starter.kill()
        starter.wait()
        _, alive = psutil.wait_procs([child, reaper], timeout=1 if closed else 20)
        assert alive == ([child] if closed else [])
    finally:
        starter.kill()
        if child.is_running():
            child.kill()


def test_who_died_is_not_waited_for() -> None:
    """Engines may wait for ever for the answer of a process that is gone."""
    with ProcessWatchdog.over_children("an engine") as watch:
        child = subprocess.Popen(["sleep", "100"])
    try:
        assert watch.call(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            watch.call(lambda: 1 // 0)
        threading.Timer(0.2, child.kill).start()
        named = re.escape(f"an engine: sleep (process {child.pid}) died")
        with watch.named(), pytest.raises(WorkerFailure, match=named):
            watch.call(threading.Event().wait)
    finally:
        watch.close()
        child.kill()
        child.wait()
