"""What a guardian kills when its process is gone, and what it leaves alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quintet.runs.fsync import OWNER
from tests.patience import BUSY

pytestmark = pytest.mark.skipif(not Path("/proc/self/exe").exists(), reason="there is no /proc")

GUARDED = """
import os, sys, time
from pathlib import Path
from quintet.cluster.guardian import Guardian
guardian = Guardian(Path(sys.argv[1]), [Path(one) for one in sys.argv[2:]])
child = os.fork()
if child == 0:
    time.sleep(1000)
print(child, flush=True)
time.sleep(1000)
"""
READ = "import sys, time; file = open(sys.argv[1]); print(flush=True); time.sleep(1000)"


def killed_guarded(directory: Path, *programs: Path) -> int:
    """Have a guardian of `directory` outlive its process, which is killed; the process id of that one's forked child."""
    guarded = subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(directory), *map(str, programs)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guarded.stdout is not None
    child = int(guarded.stdout.readline())
    guarded.kill()
    guarded.wait()
    guarded.stdout.close()
    return child


def gone(directory: Path) -> bool:
    deadline = time.monotonic() + 5 * BUSY
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not directory.exists()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = tmp_path / "guarded"
    found.mkdir()
    (found / "log").touch()
    return found


def test_a_forked_child_does_not_hold_it_up(directory: Path) -> None:
    child = killed_guarded(directory)
    try:
        assert gone(directory)
    finally:
        os.kill(child, signal.SIGKILL)


def test_of_those_who_read_a_file_only_the_programs_of_a_run_are_killed(directory: Path) -> None:
    tail = subprocess.Popen(["tail", "-f", str(directory / "log")], stdout=subprocess.DEVNULL)
    python = subprocess.Popen([sys.executable, "-c", READ, str(directory / "log")], stdout=subprocess.PIPE)
    named = subprocess.Popen(["sleep", "1000"], env={**os.environ, "TOKEN": str(directory / "token")})
    assert python.stdout is not None
    python.stdout.readline()
    child = killed_guarded(directory)
    try:
        assert gone(directory)
        assert python.wait(5 * BUSY) == named.wait(5 * BUSY) == -signal.SIGKILL
        assert tail.poll() is None
    finally:
        os.kill(child, signal.SIGKILL)
        tail.kill()
        tail.wait()
        python.stdout.close()


def test_another_run_that_removes_what_is_left_stays(directory: Path) -> None:
    """As `Scratch` does when it is made: it holds the owner's file while it removes directory after directory."""
    (directory / "r").mkdir()
    (directory / OWNER).touch()
    removing = "import os; held = os.open(sys.argv[2], os.O_RDONLY); os.remove(sys.argv[1]);"
    program = [sys.executable, "-c", READ.replace("print", f"{removing} print")]
    other = subprocess.Popen([*program, directory / OWNER, directory / "r"], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    child = killed_guarded(directory)
    try:
        assert gone(directory)
        assert other.poll() is None
    finally:
        os.kill(child, signal.SIGKILL)
        other.kill()
        other.communicate()


@pytest.mark.parametrize("above", [False, True], ids=["by name", "by directory"])
def test_other_programs_of_a_run_are_killed_too(directory: Path, tmp_path: Path, above: bool) -> None:
    program = tmp_path / "ray" / "raylet"
    program.parent.mkdir()
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o700)
    with (directory / "log").open("w") as log:
        raylet = subprocess.Popen([program, "1000"], stdout=log)
    child = killed_guarded(directory, program.parent if above else program)
    try:
        assert gone(directory)
        assert raylet.wait(5 * BUSY) == -signal.SIGKILL
    finally:
        os.kill(child, signal.SIGKILL)
