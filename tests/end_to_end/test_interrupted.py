"""Ctrl-C and SIGTERM before a run has begun: one sentence, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.patience import BUSY
from tests.train.runs import ROOT, TINY

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("begun", "how", "code", "sentence"),
    [
        pytest.param(
            "ray::IDLE", signal.SIGINT, 130, "interrupted", id="ctrl-c-in-ray", marks=pytest.mark.nightly
        ),
        pytest.param("ray::RankActor", signal.SIGTERM, 143, "ended by SIGTERM", id="sigterm-in-setup"),
    ],
)
def test_a_signal_while_ranks_start_ends_in_one_sentence(
    tmp_path: Path, begun: str, how: signal.Signals, code: int, sentence: str
) -> None:
    recipe = str(ROOT / "recipes" / "laptop_demo.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "quintet", "train", recipe, *TINY, "cluster.ranks=2", f"run.dir={tmp_path}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    started = wait_for(process, begun)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # a terminal tells all of them
    else:
        process.send_signal(how)
    began = time.monotonic()
    _, said = process.communicate(timeout=60 * BUSY)
    assert (process.returncode, said) == (code, f"quintet: {sentence}\n")
    assert time.monotonic() - began < 5 * BUSY
    assert [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert list(tmp_path.glob("quintet-*")) == []
    assert list(Path("/tmp").glob(f"quintet-ray-*/r/session_*_{process.pid}")) == []


def wait_for(program: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """All below it, once there is one whose command line has this name."""
    process, deadline = psutil.Process(program.pid), time.monotonic() + 60 * BUSY
    while time.monotonic() < deadline:
        if program.poll() is not None:
            raise AssertionError(f"it ended by itself: {program.communicate()[1]}")
        below = process.children(recursive=True)
        for one in below:
            try:
                if name in " ".join(one.cmdline()):
                    return below
            except psutil.Error:
                continue
        time.sleep(0.01)
    program.kill()
    raise AssertionError(f"no {name} within {60 * BUSY} s: {program.communicate()[1]}")
