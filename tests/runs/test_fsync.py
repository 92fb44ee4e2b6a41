"""Scratch directories: gone with their process, or with the next one that makes one; and nobody else's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.runs.fsync import OWNER, Scratch
from quintet.runs.lock import boot_id

MAKE = "import sys; from quintet.runs.fsync import Scratch; one = Scratch(parent=sys.argv[1]); print(one.name, flush=True); input()"


def made_elsewhere(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_removed_by_the_next_one_and_what_a_live_one_has_is_not(
    tmp_path: Path,
) -> None:
    killed, left = made_elsewhere(tmp_path)
    alive, kept = made_elsewhere(tmp_path)
    (left / "below").mkdir()
    (left / "below" / "file").touch()
    killed.kill()
    killed.communicate()
    assert left.exists()
    with Scratch(parent=str(tmp_path)) as mine:
        assert sorted(tmp_path.iterdir()) == sorted([kept, Path(mine)])
        assert Path(mine).stat().st_mode & 0o777 == 0o700
    alive.communicate("\n")
    assert list(tmp_path.iterdir()) == []


def test_directories_that_are_no_scratch_or_another_users_stay(tmp_path: Path) -> None:
    runs, target = tmp_path / "quintet-runs", tmp_path / "target"
    runs.mkdir()  # somebody's own
    target.mkdir()
    (target / OWNER).write_text(boot_id())
    unmarked = tmp_path / "quintet-named-alike"
    unmarked.mkdir()
    (unmarked / ".owner").touch()
    elsewhere = tmp_path / "quintet-elsewhere"  # of another machine, on a file system that both have
    elsewhere.mkdir()
    (elsewhere / OWNER).write_text("8a1c2f5e-0000-4000-8000-000000000000")
    link = tmp_path / "quintet-link"
    link.symlink_to(target)
    others = tmp_path / "quintet-others"
    if os.geteuid() == 0:
        shutil.copytree(target, others)
        os.chown(others, 65534, 65534)
    before = sorted(tmp_path.iterdir())
    with Scratch(parent=str(tmp_path)):
        pass
    assert sorted(tmp_path.iterdir()) == before
    shutil.copytree(target, tmp_path / "quintet-mine")  # it can fail
    with Scratch(parent=str(tmp_path)):
        pass
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_system_without_locks_has_scratch_directories_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: object, how: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with Scratch(parent=str(tmp_path)) as first, Scratch(parent=str(tmp_path)) as second:
        assert Path(first).exists()
        assert Path(second).exists()
    assert list(tmp_path.iterdir()) == []


FORK = """
import os, sys, time
from quintet.runs.fsync import Scratch
with Scratch(parent=sys.argv[1]) as name:
    child = os.fork()
    if child == 0 and sys.argv[2] == "exits":
        sys.exit()
    if child == 0:
        print(name, os.getpid(), flush=True)
        time.sleep(1000)
    os.waitpid(child, 0)
    print(name, child, flush=True)
    input()
"""


def forked(parent: Path, child: str) -> tuple[subprocess.Popen[str], Path, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", FORK, str(parent), child],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    name, pid = process.stdout.readline().split()
    return process, Path(name), int(pid)


def test_a_forked_child_that_exits_leaves_the_directory_to_its_parent(tmp_path: Path) -> None:
    process, directory, _ = forked(tmp_path, "exits")
    assert directory.exists()
    with Scratch(parent=str(tmp_path)):  # it is still locked, too
        assert directory.exists()
    process.communicate("\n")
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_directory(tmp_path: Path) -> None:
    process, directory, child = forked(tmp_path, "sleeps")
    try:
        process.kill()
        process.wait()
        with Scratch(parent=str(tmp_path)):
            assert not directory.exists()
    finally:
        os.kill(child, signal.SIGKILL)
