"""Whose death ended it: vLLM says that its engine is dead, and this says which of its processes died first."""

from __future__ import annotations

import multiprocessing.connection
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from quintet.errors import WorkerFailure


class Watch:
    """Watches the processes that an engine started, by their pidfds (Linux, as vLLM)."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._first: str | None = None
        self._seen = threading.Event()
        self._stop, self._wake = multiprocessing.Pipe(duplex=False)

    @classmethod
    @contextmanager
    def over_children(cls) -> Iterator[Watch]:
        """Watch what is started within the context."""
        watch = cls()
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        yield watch
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if child.pid not in before and "resource_tracker" not in "".join(child.cmdline()):
                    watch._names[os.pidfd_open(child.pid)] = f"{_title(child)} (process {child.pid})"
        if watch._names:
            threading.Thread(target=watch._wait, name="vllm-watch", daemon=True).start()

    def _wait(self) -> None:
        ready = multiprocessing.connection.wait([*self._names, self._stop])
        if self._stop not in ready:
            # Within one look the workers come before the core that fails with them.
            self._first = max((self._names[fd] for fd in ready if isinstance(fd, int)), key=len)
            self._seen.set()
        for fd in self._names:
            os.close(fd)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Turn an error that comes of a process's death into a WorkerFailure that names the process."""
        try:
            yield
        except Exception as error:
            # vLLM may notice before the watch does; a live engine's errors pass as they are.
            if self._names and (self._seen.wait(1.0 if _of_death(error) else 0) or _of_death(error)):
                who = self._first or "a process of its engine"
                raise WorkerFailure(f"vLLM: {who} died", phase="generate") from error
            raise

    def close(self) -> None:
        """Stop watching: what dies now is meant to."""
        with suppress(OSError):
            self._wake.send(None)


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()[:1]).strip() or process.name()


def _of_death(error: BaseException) -> bool:
    return type(error).__name__ in ("EngineDeadError", "EngineGenerateError")
