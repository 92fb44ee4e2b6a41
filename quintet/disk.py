"""Files: what a power cut may not undo, a reader not see half of, a full disk not end, and names that may be anything."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any, TextIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Why a disk does not take more."""


def is_file(name: str) -> bool:
    """Whether `name`, in which "~" is the home directory, is a file; False for what no file can be called."""
    return os.path.isfile(os.path.expanduser(name))  # noqa: PTH111, PTH113  (Path's raise for such names)


def sync(path: Path) -> None:
    """Wait until a file, or a directory's names (a rename, a new file), are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one move: there is all of it, or what was there before. Raises OSError, with nothing left behind."""
    draft = path.with_name(f"{path.name}.part")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


class _Lossy(io.FileIO):
    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._lost = 0

    def write(self, data: Any) -> int:
        try:
            if self._lost:
                super().write(f"\n[the disk was full: {self._lost} bytes are missing here]\n".encode())
                self._lost = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._lost += len(data)
            return len(data)


def lossy(descriptor: int) -> TextIO:
    """Open a log for text that goes on when the disk is full: what that does not take is dropped, and counted in the log once it
    takes more. The descriptor stays open."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Lossy(descriptor)), "utf-8", errors="backslashreplace", line_buffering=True
    )
