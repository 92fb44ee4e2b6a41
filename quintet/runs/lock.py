"""One process to a run directory: a lock file that says who holds it, and that dies with its holder.

On one machine the kernel's lock on the file decides: it is gone with the process, however that ended. From another
machine, where a file system may not carry such locks, a heartbeat decides: the holder touches the file every few
seconds, and whoever finds the name of another machine in it watches for that before taking it over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from quintet.errors import UserError, writing

LOCK = "run.lock"
"""Its name in a run directory."""
HEARTBEAT_S = 5.0
WATCH_S = 20.0
"""How long the lock of another machine is watched: four heartbeats."""


def holder_of(path: Path) -> str | None:
    """Return who holds the lock file at `path` at this moment, in words; None when nobody does. The file is left as it is.

    Where the file names another machine, that takes up to WATCH_S.
    """
    try:
        file = path.open(encoding="utf-8")
    except FileNotFoundError:
        return None
    with file:
        holder, held = _locked(file, path, fcntl.LOCK_SH)
    return _title(holder or {}) if held else None


class RunLock:
    """The lock of a run directory, held from its making until `release`, or until the process ends.

    Raises UserError naming the holder when another process has it, and for a directory that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_behind: str | None = None
        """Who held it last and ended without releasing it."""
        # Not to be emptied before it is ours; and no child inherits it (PEP 446), or it would outlive us.
        with writing(path):
            self._file = path.open("a+", encoding="utf-8")
        try:
            with writing(path):
                self._take()
                self._write(json.dumps(_me()) + "\n")
        except BaseException:
            with contextlib.suppress(OSError):  # of what a full disk has not taken yet
                self._file.close()
            raise
        self._released = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="run lock").start()

    def release(self) -> None:
        """Give it back; the file stays, empty."""
        if not self._released.is_set():
            self._released.set()
            self._write("")
            self._file.close()

    def _take(self) -> None:
        holder, held = _locked(self._file, self.path, fcntl.LOCK_EX)
        if held:
            raise UserError(
                f"{self.path.parent} is in use by {_title(holder or {})}: two processes cannot go on with one run. Wait for it, or "
                "end it first"
            )
        self.left_behind = None if holder is None else _title(holder)

    def _write(self, text: str) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def _locked(file: TextIO, path: Path, how: int) -> tuple[dict[str, Any] | None, bool]:
    """Lock the file if nobody has it: who is written in it then, and whether that one has it."""
    elsewhere = held = False
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        held = True
    except OSError:  # A file system without such locks: the heartbeat alone decides, on this machine too.
        elsewhere = True
    file.seek(0)
    holder = _read_holder(file)
    elsewhere = elsewhere or (holder or {}).get("boot") != boot_id()
    return holder, held or (holder is not None and elsewhere and _beats(path))


def _read_holder(file: TextIO) -> dict[str, Any] | None:
    """Who is written in the file; None when it was released."""
    text = file.read()
    try:
        value = json.loads(text)
    except ValueError:
        return {} if text.strip() else None
    return value if isinstance(value, dict) else {}


def _beats(path: Path) -> bool:
    first = path.stat().st_mtime_ns
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        time.sleep(min(0.5, WATCH_S))
        if path.stat().st_mtime_ns != first:
            return True
    return False


def _me() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": boot_id(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def boot_id() -> str:
    """Return what tells this machine, as it runs now, from others of the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _title(holder: dict[str, Any]) -> str:
    if "pid" not in holder:
        return "another process"
    return f"process {holder['pid']} on {holder.get('host')} (since {holder.get('since')})"
