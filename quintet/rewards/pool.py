"""Rewards are scored in processes of their own, beside the controller: no rank waits for Python, and no reward can hold up a run.

Groups of samples are submitted as they finish, and each is scored at once; their results are collected at the end of a step. A
sample that cannot be scored (its function raises, takes too long, or ends its process) is a failure that names the sample.

One thread a process asks it, a line of JSON each way (`pool_worker`). Quick rewards are asked for some milliseconds' worth of
samples at a time, so that a step is not spent on waking threads.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quintet.errors import UserError
from quintet.recipe.schema import Reward as Settings
from quintet.rewards.load import RewardFunction, RewardResult
from quintet.rewards.pool_worker import STACKS
from quintet.typed import Typed

MOST_PROCESSES = 8
_CHUNK_S = 0.02
"""Of samples that a process is given at a time."""
_MOST_PER_CHUNK = 64
_LOOK_EVERY_S = 0.5
"""A process is looked at as often: a child that it forked may hold its pipes open when it is gone."""
_STACKS_S, _STACKS_STEP_S = 2.0, 0.1
"""A process may take so long to begin writing its stacks before it is killed, and is looked at as often."""


@dataclass(frozen=True)
class Unscored:
    """A sample as its reward needs it; `source` names the prompt for people, such as prompts.jsonl:17."""

    prompt: str
    response: str
    answer: str
    source: str


class Scoring:
    """Samples that were submitted together, and their results so far."""

    def __init__(self, samples: Sequence[Unscored]) -> None:
        self.samples = list(samples)
        self.results: list[RewardResult | None] = [None] * len(self.samples)
        self.cancelled = False
        self._left = len(self.samples)

    @property
    def done(self) -> bool:
        """Whether all of them are scored."""
        return self._left == 0

    def put(self, number: int, result: RewardResult) -> None:
        """Note the one result of a sample."""
        assert self.results[number] is None
        self.results[number] = result
        self._left -= 1


@dataclass(frozen=True)
class _Job:
    scoring: Scoring
    number: int

    @property
    def sample(self) -> Unscored:
        return self.scoring.samples[self.number]


@dataclass(frozen=True)
class _Answer:
    """A line of a process: a reward, or why there is none; `stop` where no sample is to blame. An empty one: it has loaded."""

    reward: float | None = None
    metrics: dict[str, float] | None = None
    timed_out: bool = False
    failure: str | None = None
    stop: str | None = None


_ANSWER: Typed[_Answer] = Typed(_Answer, "an answer of a reward process")


class RewardPool:
    """`with RewardPool(reward, settings, log_dir) as pool:` scores samples for the length of the block.

    Processes start at `start`, or with the first samples, in the background; what they print is in reward-N.log of `log_dir`. They
    compute on one thread each and see no GPU. They end with the block, and with this process, however it ends.

    workers: how many; by default one a CPU, at most 8.
    """

    def __init__(
        self, reward: RewardFunction, settings: Settings, log_dir: Path, workers: int | None = None
    ) -> None:
        self._spec, self._settings, self._log_dir = reward.spec, settings, log_dir.absolute()
        self._lock = threading.Lock()
        self._work, self._news = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queue: deque[_Job] = deque()
        self._processes = [
            _Process(self._spec, self._log_dir / f"reward-{n}.log") for n in range(workers or _cpus())
        ]
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._loaded = False
        self._broken: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Have the processes start, and load the reward, while this process goes on."""
        if self._threads:
            return
        self._log_dir.mkdir(parents=True, exist_ok=True)
        # These threads last as long as the pool: a process ends with the thread that started it.
        self._threads = [
            threading.Thread(target=self._run, args=(process,), name=f"reward-{n}", daemon=True)
            for n, process in enumerate(self._processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, samples: Sequence[Unscored]) -> Scoring:
        """Begin to score samples, after those that were submitted before."""
        self.start()
        scoring = Scoring(samples)
        with self._lock:
            assert not self._closed, "the pool is closed"
            self._queue.extend(_Job(scoring, number) for number in range(len(samples)))
            self._work.notify_all()
        return scoring

    def results(self, scorings: Sequence[Scoring]) -> list[RewardResult]:
        """Wait for what was submitted, for `step_timeout_s` at most, and return it sample by sample, in the order of `scorings`.

        Raises:
            UserError: a sample could not be scored and `on_error` is stop, or the reward could not be loaded at all.
        """
        deadline = time.monotonic() + self._settings.step_timeout_s
        try:
            with self._lock:
                while not all(scoring.done for scoring in scorings):
                    self._check(scorings)
                    left = deadline - time.monotonic()
                    if left <= 0:
                        self._give_up(scorings)
                        break
                    self._news.wait(left)
                self._check(scorings)
        finally:
            with self._lock:
                self._cancel(scorings)
        return [result for scoring in scorings for result in scoring.results if result is not None]

    def close(self) -> None:
        """End the processes, whatever they do, and wait for that."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._work.notify_all()
            for process in self._processes:
                process.kill()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.forget()

    def _check(self, scorings: Sequence[Scoring]) -> None:
        """Raise what ends the run."""
        if self._broken is not None:
            raise self._broken
        if self._settings.on_error == "zero":
            return
        for number, (sample, result) in enumerate(_pairs(scorings)):
            if result is not None and result.failure is not None:
                raise UserError(
                    f"sample {number}, {sample.response[-80:]!r}, to {sample.source}: {result.failure.rstrip()}\n"
                    "reward.on_error=zero would count it as 0, and go on"
                )

    def _give_up(self, scorings: Sequence[Scoring]) -> None:
        """What is not scored by now is not scored at all."""
        why = f"took longer than reward.step_timeout_s={self._settings.step_timeout_s:g} for all samples of the step"
        if not self._loaded:
            raise UserError(
                f"reward {self._spec} {why}, and none of its processes has come to its end of loading; "
                f"what they print is in {self._processes[0].log}"
            )
        began = {job for process in self._processes if (job := process.job) is not None}
        for scoring in scorings:
            for number, result in enumerate(scoring.results):
                if result is None:
                    how = "it was being scored" if _Job(scoring, number) in began else "it had not begun"
                    why_not = f"reward {self._spec} {why}; {how}"
                    scoring.put(number, RewardResult(0.0, {}, failure=why_not))

    def _cancel(self, scorings: Sequence[Scoring]) -> None:
        """Leave unscored what is still asked for; a process that is busy with it is replaced."""
        for scoring in scorings:
            scoring.cancelled = True
        self._queue = deque(job for job in self._queue if not job.scoring.cancelled)
        for process in self._processes:
            if process.job is not None and process.job.scoring.cancelled:
                process.kill()

    def _run(self, process: _Process) -> None:
        try:
            try:
                self._serve(process)
            finally:
                process.kill()
        except BaseException as error:
            with self._lock:
                self._broken = self._broken or error
                self._news.notify_all()

    def _serve(self, process: _Process) -> None:
        share = 1
        while not self._closed:
            if not process.running:
                self._load(process)
                continue
            with self._lock:
                while not self._queue and not self._closed:
                    self._work.wait()
                fair = math.ceil(len(self._queue) / len(self._processes))
                jobs = [self._queue.popleft() for _ in range(min(share, fair))]
            began = time.monotonic()
            scored = self._score(process, jobs)
            share = min(_MOST_PER_CHUNK, max(1, int(_CHUNK_S * scored / max(time.monotonic() - began, 1e-6))))

    def _load(self, process: _Process) -> None:
        process.forget()
        with self._lock:
            if self._closed:
                return
            process.start()
        try:
            told = process.answer(None)
        except _Ended as ended:
            if process.killed:
                return
            raise UserError(
                f"reward {self._spec} {ended} while it was loaded; what it printed is in {process.log}"
            ) from None
        if told.stop is not None:
            raise UserError(told.stop)
        self._loaded = True

    def _score(self, process: _Process, jobs: list[_Job]) -> int:
        """Ask for samples, and return how many were answered. The rest waits for another process where one fails."""
        process.ask([job.sample for job in jobs])
        for at, job in enumerate(jobs):
            with self._lock:
                process.job = job
            failure = None
            try:
                told = process.answer(self._settings.timeout_s)
            except _Late:
                failure = f"reward {self._spec} took longer than reward.timeout_s={self._settings.timeout_s:g}; its stacks are"
                process.tell_stacks()
            except _Ended as ended:
                failure = f"reward {self._spec} {ended}; what it printed is"
            with self._lock:
                process.job = None
                if failure is not None:
                    blamed = not process.killed  # by us, for another sample's sake
                    process.kill()
                    if blamed:
                        self._note(job, RewardResult(0.0, {}, failure=f"{failure} in {process.log}"))
                    rest = jobs[at + blamed :]
                    self._queue.extendleft(one for one in reversed(rest) if not one.scoring.cancelled)
                    self._work.notify_all()
                    return at
                if told.stop is not None:
                    raise UserError(told.stop)
                if told.failure is not None or told.reward is None:
                    why = told.failure or f"reward {self._spec} gave no number"
                    self._note(job, RewardResult(0.0, {}, failure=why))
                else:
                    self._note(job, RewardResult(told.reward, told.metrics or {}, told.timed_out))
        return len(jobs)

    def _note(self, job: _Job, result: RewardResult) -> None:
        if job.scoring.cancelled or job.scoring.results[job.number] is not None:
            return  # it comes just when the step has given up waiting for it
        job.scoring.put(job.number, result)
        if job.scoring.done or (result.failure is not None and self._settings.on_error == "stop"):
            self._news.notify_all()


class _Late(Exception):
    """A process has not answered in time."""


class _Ended(Exception):
    """A process is gone, or no longer makes sense; says how."""


class _Process:
    """One process, asked by one thread; `kill` is for every thread. Not started by being made, and started anew after its end."""

    def __init__(self, spec: str, log: Path) -> None:
        self.log = log
        self.job: _Job | None = None
        """What it is scoring now."""
        self.killed = False
        """Whether `kill` has ended it."""
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._asked, self._answered = -1, -1
        self._out, self._in = bytearray(), bytearray()

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        return self._process is not None and not self.killed

    def start(self) -> None:
        """Start it, after `forget`; the first answer tells that it has loaded."""
        asked, self._asked = os.pipe()
        self._answered, answered = os.pipe()
        script = str(Path(__file__).with_name("pool_worker.py"))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                # -P: no module of this package, or of the working directory, stands before the standard library's.
                [sys.executable, "-P", "-u", script, str(asked), str(answered), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(asked, answered),
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # Ctrl-C is not for it, and what it starts is killed with it
            )
        os.close(asked)
        os.close(answered)
        os.set_blocking(self._asked, False)
        os.set_blocking(self._answered, False)
        self.killed = False
        path = [one for one in sys.path if one]  # "" is the working directory
        self._out, self._in = bytearray(_line({"function": self._spec, "path": path})), bytearray()

    def ask(self, samples: Sequence[Unscored]) -> None:
        """Have it score samples; each is one `answer`, in order."""
        for sample in samples:
            self._out += _line([sample.prompt, sample.response, sample.answer])

    def answer(self, timeout_s: float | None) -> _Answer:
        """The next answer. Raises _Late, or _Ended."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._in:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _Late
            events = select.poll()
            events.register(self._answered, select.POLLIN)
            if self._out:
                events.register(self._asked, select.POLLOUT)
            ready = dict(events.poll(1000 * min(left, _LOOK_EVERY_S)))
            if self._asked in ready:
                self._send()
            ended = self._process is None or self._process.poll() is not None  # looked at before what it left
            if not self._receive() and (ended or self._answered in ready):
                raise _Ended(self._end())
        line, _, rest = bytes(self._in).partition(b"\n")
        self._in = bytearray(rest)
        try:
            return _ANSWER.load(line, "it")
        except Exception as error:
            raise _Ended(f"wrote into the pipe that its process answers by ({error})") from None

    def tell_stacks(self) -> None:
        """Have it write its stacks to its log, if it still can."""
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
        """End it, with all it has started. Wait for `forget` before its number is used again."""
        if self._process is not None and not self.killed:
            self.killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def forget(self) -> None:
        """Clear up after one that has ended, or was killed."""
        if self._process is None:
            return
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
            return f"lost its process, killed by {what}" + (
                " (as for want of memory)" if what == "SIGKILL" else ""
            )
        return "closed the pipe that its process answers by"


def _pairs(scorings: Sequence[Scoring]) -> Iterator[tuple[Unscored, RewardResult | None]]:
    for scoring in scorings:
        yield from zip(scoring.samples, scoring.results, strict=True)


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _cpus() -> int:
    """How many processes there are by default."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MOST_PROCESSES)
