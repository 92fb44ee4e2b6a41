"""Benchmarks that are ended from outside take with them what they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmark_runs import ROOT
from tests.patience import BUSY

STARTED = """#!/bin/sh
echo $$ > {told}.part; mv {told}.part {told}
exec sleep 1000
"""


@pytest.mark.parametrize("words", ["handover --tiny", "gpu_steps --tiny", "step --tiny --only quintet"])
@pytest.mark.parametrize("ended", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_does_not_outlive_its_benchmark(words: str, ended: int, tmp_path: Path) -> None:
    """At SIGKILL what is killed is its process group, as `gpu_check` does."""
    name, *options = words.split()
    told, run = tmp_path / "pid", tmp_path / "python"
    run.write_text(STARTED.format(told=told))
    run.chmod(0o755)
    start = f"import sys; from benchmarks.{name} import main; sys.executable = {str(run)!r}; main({options})"
    process = subprocess.Popen([sys.executable, "-c", start], cwd=ROOT, start_new_session=True)
    try:
        _until(told.exists)
        os.kill(process.pid, ended) if ended == signal.SIGTERM else os.killpg(process.pid, ended)
        process.wait(60 * BUSY)
        _until(lambda: not _runs(int(told.read_text())))
    finally:
        for pid in (process.pid, *([int(told.read_text())] if told.exists() else [])):
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60 * BUSY
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Not a zombie, which nobody may have waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
