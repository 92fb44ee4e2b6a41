"""One process that scores samples, as the pool's thread sees it: asked by lines of JSON, answering by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.rewards.pool_worker import STACKS
from quintet.rewards.result import RewardResult
from quintet.runs.successor import when_this_has_ended
from quintet.typed import Typed

_LOOK_EVERY_S = 0.5
"""A process is looked at as often: a child that it forked may hold its pipes open when it is gone."""
_STACKS_S, _STACKS_STEP_S = 2.0, 0.1
"""A process may take so long to begin writing its stacks before it is killed, and is looked at as often."""


@dataclass(frozen=True)
class Answer:
    """A line of a process: what a sample is worth; `stop` where no sample is to blame. An empty one: it has loaded."""

    result: RewardResult | None = None
    stop: str | None = None


_ANSWER: Typed[Answer] = Typed(Answer, "an answer of a reward process")


class AnswerLate(Exception):
    """A process has not answered in time."""


class ProcessEnded(Exception):
    """A process is gone, or no longer makes sense; says how."""


class RewardProcess:
    """One process that scores, asked by one thread; `kill` is for every thread. Not started by being made, and started anew after
    its end."""

    def __init__(self, spec: str, log: Path) -> None:
        self.log = log
        self.job: Any = None
        """What it is scoring now, as its pool notes it."""
        self.killed = False
        """Whether `kill` has ended it."""
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._asked, self._answered = -1, -1
        self._out, self._in = bytearray(), bytearray()

    @property
    def running(self) -> bool:
        """Whether the process can be asked."""
        return self._process is not None and not self.killed

    def start(self) -> None:
        """Start the process, after `forget`; the first answer tells that it has loaded."""
        asked, self._asked = os.pipe()
        self._answered, answered = os.pipe()
        script = str(Path(__file__).with_name("pool_worker.py"))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                # -P: no module of this package, or of the working directory, stands before the standard library's.
                [sys.executable, "-P", "-u", script, str(asked), str(answered)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(asked, answered),
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # Ctrl-C is not for it, and what it starts is killed with it
            )
        group = str(self._process.pid)
        self._reaper = when_this_has_ended('kill -s KILL -- "-$1"', "quintet-reaper", group)
        os.close(asked)
        os.close(answered)
        os.set_blocking(self._asked, False)
        os.set_blocking(self._answered, False)
        self.killed = False
        path = [one for one in sys.path if one]  # "" is the working directory
        self._out, self._in = bytearray(_line({"function": self._spec, "path": path})), bytearray()

    def ask(self, samples: Iterable[tuple[str, str, str, Mapping[str, Any] | None]]) -> None:
        """Have the process score samples (prompt, response, answer, row); each is one `answer`, in order."""
        for sample in samples:
            self._out += _line(sample)

    def answer(self, timeout_s: float | None) -> Answer:
        """Return the next answer of the process. Raises AnswerLate, or ProcessEnded."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._in:
            left = deadline - time.monotonic()
            if left <= 0:
                raise AnswerLate
            events = select.poll()
            events.register(self._answered, select.POLLIN)
            if self._out:
                events.register(self._asked, select.POLLOUT)
            ready = dict(events.poll(1000 * min(left, _LOOK_EVERY_S)))
            if self._asked in ready:
                self._send()
            ended = self._process is None or self._process.poll() is not None  # looked at before what it left
            if not self._receive() and (ended or self._answered in ready):
                raise ProcessEnded(self._end())
        line, _, rest = bytes(self._in).partition(b"\n")
        self._in = bytearray(rest)
        try:
            return _ANSWER.load(line, "it")
        except Exception as error:
            raise ProcessEnded(f"wrote into the pipe that its process answers by ({error})") from None

    def tell_stacks(self) -> None:
        """Have the process write its stacks to its log, if it still can."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):  # someone took the log away
            before, deadline = self.log.stat().st_size, time.monotonic() + _STACKS_S
            self._process.send_signal(STACKS)
            began = False
            while not began and time.monotonic() < deadline and self._process.poll() is None:
                began = self.log.stat().st_size > before
                time.sleep(_STACKS_STEP_S)  # and once more for the rest

    def kill(self) -> None:
        """End the process, with all it has started. Wait for `forget` before its number is used again."""
        if self._process is not None and not self.killed:
            self.killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def printed(self) -> str:
        """Return where to find what it printed; a log with nothing in it is not left."""
        something = self.log.exists() and self.log.stat().st_size
        return f"what it printed is in {self.log}" if something else "it printed nothing"

    def forget(self) -> None:
        """Clear up after a process that has ended, or was killed."""
        if self._process is None or self._reaper is None:
            return
        self._reaper.kill()  # before the number that it knows is free
        self._reaper.communicate()
        self._process.wait()
        for pipe in (self._asked, self._answered):
            os.close(pipe)
        self._process = None
        with contextlib.suppress(OSError):
            if not self.log.stat().st_size:
                self.log.unlink()

    def _send(self) -> None:
        try:
            del self._out[: os.write(self._asked, self._out)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._out.clear()

    def _receive(self) -> bool:
        """Read what there is; False where there is nothing."""
        try:
            data = os.read(self._answered, 1 << 16)
        except BlockingIOError:
            return False
        self._in += data
        return bool(data)

    def _end(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_LOOK_EVERY_S)
            if code >= 0:
                return f"ended its process with code {code}"
            what = signal.Signals(-code).name
            why = " (as for want of memory)" if what == "SIGKILL" else ""
            return f"lost its process, killed by {what}{why}"
        return "closed the pipe that its process answers by"


def _line(value: Any) -> bytes:
    return json.dumps(value, default=str).encode() + b"\n"  # a row may hold dates
