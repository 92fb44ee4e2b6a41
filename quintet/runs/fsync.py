"""Files: what a power cut may not undo, a reader not see half of, a full disk not end, and a killed process not leave."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import io
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from quintet.runs.lock import boot_id

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Why a disk does not take more."""


OWNER = ".quintet-scratch"
"""The file in a scratch directory that names its machine, and that its owner has locked: the kernel's lock is gone with the process,
however that ended."""


def fsync_path(path: Path) -> None:
    """Wait until a file, or a directory's names (a rename, a new file), are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one move: there is all of it, or what was there before. Raises OSError, with nothing left behind."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
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
            if error.errno not in (*FULL, errno.EPIPE):
                raise
            self._lost += len(data)
            return len(data)


def lossy(descriptor: int) -> TextIO:
    """Open a log for text that goes on when the disk is full, or nobody reads the pipe any more: what is not taken is dropped, and counted
    in the log once it takes more. The descriptor stays open."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Lossy(descriptor)), "utf-8", errors="backslashreplace", line_buffering=True
    )


class Scratch(tempfile.TemporaryDirectory[str]):
    """A directory that only this user can enter, for as long as this process needs it.

    Whoever makes one first removes those beside it with the same prefix that killed processes of the same user have left on this
    machine.
    A child that is forked from this process may use it, and neither keeps nor removes it.
    """

    def __init__(self, prefix: str = "quintet-", parent: str | None = None) -> None:
        remove_left_behind(Path(parent or tempfile.gettempdir()), prefix)
        super().__init__(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
        self.path = Path(self.name)
        # It gets its name once it is locked: a file that can be locked has no owner any more. Where a file system has no locks,
        # nobody removes what is left behind.
        unnamed = self.path / f"{OWNER}.new"
        self._lock = unnamed.open("wb", buffering=0)
        call_in_forked_children(self._leave_to_parent)
        with contextlib.suppress(OSError):
            self._lock.write(_machine())
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unnamed.rename(self.path / OWNER)

    def cleanup(self) -> None:
        if not self._lock.closed:
            super().cleanup()
            self._lock.close()

    def _leave_to_parent(self) -> None:
        self._finalizer.detach()  # type: ignore[attr-defined]
        self._lock.close()  # the parent's lock stays: it is gone when nobody has the file open


def call_in_forked_children(method: Callable[[], None]) -> None:
    """Call an object's method in every child that is forked from this process, without a new program, while the object is there."""
    weak = weakref.WeakMethod(method)

    def call() -> None:
        if (found := weak()) is not None:
            found()

    os.register_at_fork(after_in_child=call)


def remove_left_behind(parent: Path, prefix: str) -> None:
    """Remove the scratch directories in `parent` whose owners are gone, where they were this user's, on this machine: of another one
    that shares `parent` the locks may not be seen here."""
    for directory in parent.glob(f"{glob.escape(prefix)}*"):
        try:
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            with (directory / OWNER).open("rb") as lock:
                if set(lock.read().split()) & set(_machine().split()):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # it has no owner's file, or a live owner, or is gone already
            continue


def _machine() -> bytes:
    """What tells this machine from others: as it runs now, as its containers are, and after it was started anew."""
    return f"{boot_id()} {socket.gethostname()}".encode()
