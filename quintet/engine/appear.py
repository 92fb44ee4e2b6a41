"""Directories that appear whole: written under a temporary name beside their own, and renamed when all is on the disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quintet.errors import UserError


@contextmanager
def appearing(path: Path, nbytes: int) -> Iterator[Path]:
    """The temporary directory to write about `nbytes` to; `path` is there once the block is left without an error, and
    nothing is left after one. path: not there yet, or an empty directory.

    Raises UserError when `path` is there already, and for every OSError: it has to come from the disk that is written to.
    """
    part = path.with_name(path.name + ".part")
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} is there already: name a path that is not, or remove it")
        path.parent.mkdir(parents=True, exist_ok=True)
        if part.exists():
            shutil.rmtree(part)  # of a process that was killed
        part.mkdir()
        if nbytes > shutil.disk_usage(part).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield part
        for one in (*part.rglob("*"), part):
            _sync(one)
        part.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise refusal(path, nbytes, error) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def refusal(path: Path, nbytes: int, error: OSError) -> UserError:
    """What a disk's error means to who wanted `path` written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        parents = (one for one in path.parents if one.exists())
        free = shutil.disk_usage(next(parents)).free
        return UserError(
            f"{path} cannot be written: the disk is full ({nbytes / 1e9:.2f} GB of weights, {free / 1e9:.2f} GB free); make "
            "room or name another place. What was written of it is removed"
        )
    return UserError(f"{path} cannot be written: {error.strerror}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
