"""math-verify in a process of its own.

In-process it would bring its limits with it: its timeouts are signals (main thread only), `9**9**9` in a response
stops the interpreter inside one C call that no signal interrupts, and its logging is loud. A process can be ended, and
`math_worker` has itself ended after 0.2 s of processor time.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

from quintet.errors import UserError

TIMEOUT_S = 10.0
"""By the clock, for a worker that has no processor time to be ended by."""
_START_TIMEOUT_S = 120.0


class _MathProcess:
    """One worker, started at the first question and again after it had to be ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def ask(self, gold: str, answer: str) -> bool | None:
        """Whether the two are equal; None if the worker cannot tell in time."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
                process.stdin.flush()
            except OSError:
                self.close()
                return None
            line = self._line(process, TIMEOUT_S)
            if line is None:
                self.close()
            return None if line in (None, b"x") else line == b"1"

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._pid == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        # -P: a module of this package must never stand before the standard library's of that name.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        if self._line(self._process, _START_TIMEOUT_S) is None:
            self.close()
            raise UserError(
                "the `math` reward could not start math-verify; is it installed (pip install 'math-verify')? "
                "`gsm8k` and `exact_match` do without it"
            )
        return self._process

    @staticmethod
    def _line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
        """The next line of output, stripped; None if it takes too long or the process ended."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return None
        # Lines are two bytes, written at once: a readable pipe holds a whole one, or the end.
        line = process.stdout.readline()
        return line.strip() if line.endswith(b"\n") else None


_processes: dict[int, _MathProcess] = {}


def _this_process() -> _MathProcess:
    """The worker of this process: a fork must not talk on its parent's pipes."""
    pid = os.getpid()
    if pid not in _processes:
        _processes[pid] = _MathProcess()
        atexit.register(_processes[pid].close)
    return _processes[pid]


@lru_cache(maxsize=4096)
def equivalent(gold: str, answer: str) -> bool | None:
    """Whether two expressions (LaTeX or plain) are equal as mathematics; None where that takes too long to tell.

    Cached: samples of one prompt repeat their answers. The worker takes seconds to start, a question milliseconds.

    Raises:
        UserError: math-verify is not installed.
    """
    return _this_process().ask(gold, answer)
