"""Directories that appear whole: written under a temporary name beside their own, and renamed when all is on the disk.

The temporary directory is a `Scratch` beside `name`, called `.name.XXXXXXXX`, and what is renamed is `whole` in it. What a process
that was killed has left of the same name is removed; a directory that merely has such a name is left alone.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quintet.errors import UserError
from quintet.runs.fsync import Scratch, fsync_path


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
        with Scratch(f".{target.name}.", str(target.parent)) as scratch:
            part = Path(scratch) / "whole"
            part.mkdir()
            if nbytes > shutil.disk_usage(part).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield part
            for one in (*part.rglob("*"), part):
                fsync_path(one)
            part.replace(target)
            fsync_path(target.parent)
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
