"""One process to a run directory."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quintet.errors import UserError
from quintet.runs import lock
from quintet.runs.lock import RunLock
from tests.patience import BUSY

HOLD = "import sys, time; from quintet.runs.lock import RunLock; held = RunLock(__import__('pathlib').Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(lock, "WATCH_S", 0.6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.lock"


def test_a_second_process_is_refused_until_the_first_is_killed(path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=rf"is in use by process {holder.pid} on \S+ \(since .*two processes"):
        RunLock(path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    taken = RunLock(path)
    assert taken.left_behind is not None
    assert f"process {holder.pid} " in taken.left_behind
    taken.release()


def test_a_released_lock_is_free_and_names_no_one(path):
    first = RunLock(path)
    with pytest.raises(UserError, match="is in use"):
        RunLock(path)
    first.release()
    first.release()
    second = RunLock(path)
    assert second.left_behind is None
    second.release()


def elsewhere(path: Path) -> None:
    """As a process of another machine leaves the file, on a file system whose locks do not reach here."""
    path.write_text(json.dumps({"pid": 7, "host": "node12", "boot": "another", "since": "noon"}))


def test_another_machines_lock_is_taken_once_its_heart_has_stopped(path):
    elsewhere(path)
    began = time.monotonic()
    taken = RunLock(path)
    assert time.monotonic() - began >= lock.WATCH_S
    assert taken.left_behind == "process 7 on node12 (since noon)"
    taken.release()


def test_another_machines_lock_is_respected_while_its_heart_beats(path):
    elsewhere(path)
    beat = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import os, time\nfor _ in range(300): os.utime({str(path)!r}); time.sleep(0.1)"]
    )  # fmt: skip
    try:
        time.sleep(0.3)
        with pytest.raises(UserError, match=re.escape("process 7 on node12 (since noon)")):
            RunLock(path)
    finally:
        beat.kill()
        beat.wait()


def test_the_holder_s_heart_beats(path):
    held = RunLock(path)
    first = path.stat().st_mtime_ns
    deadline = time.monotonic() + 10 * BUSY
    while path.stat().st_mtime_ns == first:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    held.release()


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(UserError, match=r"gone/run\.lock cannot be written: No such file or directory"):
        RunLock(tmp_path / "gone" / "run.lock")


@pytest.mark.parametrize("text", ["", "half a li", "[]"])
def test_a_file_of_no_sense_stops_no_one(path, text):
    path.write_text(text)
    RunLock(path).release()
