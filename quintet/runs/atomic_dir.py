"""Directories that appear whole: written under a temporary name beside their own, and renamed when all is on the disk.

The temporary directory of `name` is `.name.XXXXXXXX.part`, a name that no other call has. In it are `lock`, which the
writing process holds locked, and `whole`, which is renamed. Only what holds a lock that nobody has is removed as left behind by a
process that was killed: a directory that merely has such a name is left alone.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from quintet.errors import UserError
from quintet.runs.fsync import sync

LOCK = "lock"


@contextmanager
def atomic_directory(path: Path, nbytes: int) -> Iterator[Path]:
    """Yield the temporary directory to write about `nbytes` to; `path` is there once the block is left without an error, and
    nothing is left after one. path: not there yet, or an empty directory.

    Raises UserError when `path` is there already, and for every OSError: it has to come from the disk that is written to.
    """
    target = path.resolve()  # of a symbolic link: where it leads
    try:
        _check_free(path, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(target)
        with _place_for(target) as part:
            if nbytes > shutil.disk_usage(part).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield part
            for one in (*part.rglob("*"), part):
                sync(one)
            part.replace(target)
            sync(target.parent)
    except OSError as error:
        raise refusal(path, nbytes, error) from None


def _check_free(path: Path, target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise UserError(f"{path} is there already: name a path that is not, or remove it")
    if target == Path.cwd() or target.is_mount():
        what = "the working directory" if target == Path.cwd() else "a mount point"
        raise UserError(f"{path} is {what}, which cannot be replaced: name a new directory in it")


@contextmanager
def _place_for(target: Path) -> Iterator[Path]:
    """An empty directory `whole` of this call's own, beside a lock that is held until the block is left."""
    name = f".{target.name}.{uuid.uuid4().hex[:8]}"
    place = target.with_name(f"{name}.part")
    made = target.with_name(f"{name}.new")  # nobody looks for it under this name while it is not locked
    made.mkdir()
    lock: TextIO | None = None
    try:
        lock = (made / LOCK).open("x")
        with suppress(OSError):  # where there are no locks, nobody gets this one either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.write(socket.gethostname())
        lock.flush()
        made.rename(place)
        (place / "whole").mkdir()
        yield place / "whole"
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(made, ignore_errors=True)
        if lock is not None:
            with suppress(OSError):  # what is buffered may not fit on the disk
                lock.close()


def _remove_left_behind(target: Path) -> None:
    """What processes of this machine that were killed left of the same target."""
    for place in target.parent.glob(f".{glob.escape(target.name)}.????????.part"):
        with suppress(OSError), (place / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read() == socket.gethostname():  # locks of other machines may not be seen here
                shutil.rmtree(place, ignore_errors=True)


def refusal(path: Path, nbytes: int, error: OSError) -> UserError:
    """Return what a disk's error means to who wanted `path` written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        parents = (one for one in path.absolute().parents if one.exists())
        free = shutil.disk_usage(next(parents)).free
        return UserError(
            f"{path} cannot be written: the disk is full ({nbytes / 1e9:.2f} GB of weights, {free / 1e9:.2f} GB free); make "
            "room or name another place. What was written of it is removed"
        )
    return UserError(f"{path} cannot be written: {error.strerror}")
