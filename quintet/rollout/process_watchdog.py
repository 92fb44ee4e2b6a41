"""Whose death ended it: an engine says that it is dead, or nothing at all, and this says which of its processes died first.

And what ends with it: an engine's processes do not notice that the one which started them was killed, and would keep their
devices' memory.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import psutil

from quintet.errors import WorkerFailure
from quintet.runs.successor import when_this_has_ended

T = TypeVar("T")
CHECK_EVERY_S = 0.5


class ProcessWatchdog:
    """Watches the processes that an engine started, by their pidfds (Linux). engine: what messages call it."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._names: dict[int, str] = {}
        self._first: str | None = None
        self._seen = threading.Event()
        self._stop, self._wake = multiprocessing.Pipe(duplex=False)
        self._reaper: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextmanager
    def over_children(cls, engine: str) -> Iterator[ProcessWatchdog]:
        """Watch what is started within the context; it ends when this process does, however that ends."""
        watch = cls(engine)
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        yield watch
        started: list[int] = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if child.pid not in before and "resource_tracker" not in "".join(child.cmdline()):
                    watch._names[os.pidfd_open(child.pid)] = f"{_title(child)} (process {child.pid})"
                    started.append(child.pid)
        if watch._names:
            watch._reaper = _ended_with_this(started)
            threading.Thread(target=watch._wait, name="engine-watch", daemon=True).start()

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
            # The engine may notice before the watch does; a live engine's errors pass as they are.
            if self._names and (self._seen.wait(1.0 if _of_death(error) else 0) or _of_death(error)):
                raise self._failure() from error
            raise

    def wait_for(self, future: Future[T]) -> T:
        """Return a future's result. Raises the WorkerFailure that names the process if one dies meanwhile: an engine may wait for
        ever for the answer of one that did."""
        while not wait([future], CHECK_EVERY_S).done:
            self.check()
        return future.result()

    def each(self, future: Future[Any], came: SimpleQueue[T | None]) -> Iterator[T]:
        """Yield what another thread puts into a queue until the future is done.

        Raises the future's error, or as `wait_for` does. Left before its end, it cancels the future."""
        future.add_done_callback(lambda _: came.put(None))
        try:
            while True:
                try:
                    one = came.get(timeout=CHECK_EVERY_S)
                except Empty:
                    self.check()
                    continue
                if one is None:
                    future.result()
                    return
                yield one
        finally:
            future.cancel()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in another thread, and return what it returns; waits as `wait_for`."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="engine-call", daemon=True).start()
        return self.wait_for(future)

    def check(self) -> None:
        """Raise the WorkerFailure that names the process if one has died: for engines that then wait for ever."""
        if self._seen.is_set():
            raise self._failure()

    def _failure(self) -> WorkerFailure:
        who = self._first or "a process of its engine"
        return WorkerFailure(f"{self._engine}: {who} died", phase="generate")

    def close(self) -> None:
        """Stop watching: what dies now is meant to."""
        with suppress(OSError):
            self._wake.send_bytes(b"stop")
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.communicate()
            self._reaper = None


def _ended_with_this(pids: list[int]) -> subprocess.Popen[bytes]:
    """A process that waits until this one is gone, which closes its input, and then kills those; not one that has come to
    another's number."""
    which = [f"{pid}:{began}" for pid in pids if (began := _began(pid)) is not None]
    return when_this_has_ended(_REAP, "quintet-reaper", *which)


_REAP = """for one in "$@"; do
    [ "$(sed 's/.*) //' /proc/${one%:*}/stat | cut -d' ' -f20)" = "${one#*:}" ] && kill -9 "${one%:*}"
done"""


def _began(pid: int) -> str | None:
    """When a process began, in ticks since the machine did (proc(5), field 22); None of one that is gone."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return told.rpartition(") ")[2].split()[19]
    except (OSError, IndexError):
        return None


def _title(process: psutil.Process) -> str:
    """vLLM gives its processes titles, such as VLLM::Worker_TP1; of one that has none an interpreter's path would tell nothing."""
    title = (process.cmdline() or [""])[0].strip()
    return "its engine" if Path(title).name.startswith("python") else title


def _of_death(error: BaseException) -> bool:
    return type(error).__name__ == "EngineDeadError"
