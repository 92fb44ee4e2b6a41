"""Rewards are scored in processes of their own, beside the controller: no rank waits for Python, and no reward can hold up a run.

Groups of samples are submitted as they finish, and each is scored at once; their results are collected at the end of a step. A
sample that cannot be scored (its function raises, takes too long, or ends its process) is a failure that names the sample.

One thread a process asks it, a line of JSON each way (`pool_worker`). Quick rewards are asked for some milliseconds' worth of
samples at a time, so that a step is not spent on waking threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from quintet.errors import UserError
from quintet.recipe.schema import Reward as Settings
from quintet.rewards.load import RewardFunction
from quintet.rewards.pool_process import AnswerLate, ProcessEnded, RewardProcess
from quintet.rewards.result import RewardResult
from quintet.runs.process import cores_here

MOST_PROCESSES = 8
_CHUNK_S = 0.02
"""Of samples that a process is given at a time."""
_MOST_PER_CHUNK = 64


@dataclass(frozen=True)
class Unscored:
    """A sample as its reward needs it; `source` names the prompt for people, such as prompts.jsonl:17."""

    prompt: str
    response: str
    answer: str
    source: str
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data set's columns."""


class Scoring:
    """Samples that were submitted together, and their results so far. first: the number of the first in its batch."""

    def __init__(self, samples: Sequence[Unscored], first: int = 0) -> None:
        self.samples, self.first = list(samples), first
        self.results: list[RewardResult | None] = [None] * len(self.samples)
        self.cancelled = False
        self._left = len(self.samples)

    @property
    def done(self) -> bool:
        """Whether all of the samples are scored."""
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


class RewardPool:
    """Processes that score: `with RewardPool(reward, settings, log_dir) as pool:` scores samples for the length of the block.

    Processes start at `start`, or with the first samples, in the background; what they print is in reward-N.log of `log_dir`. They
    compute on one thread each and see no GPU. They end with the block, and with this process, however it ends.

    workers: how many; by default one a CPU, at most 8.
    """

    def __init__(
        self, reward: RewardFunction, settings: Settings, log_dir: Path, workers: int | None = None
    ) -> None:
        self._spec, self._settings, self._log_dir = reward.spec, settings, log_dir.absolute()
        self._takes_row = reward.takes.row
        self._lock = threading.RLock()
        self._work, self._news = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queue: deque[_Job] = deque()
        count = workers or min(cores_here(), MOST_PROCESSES)
        self._processes = [RewardProcess(self._spec, self._log_dir / f"reward-{n}.log") for n in range(count)]
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
        self._threads = [
            threading.Thread(target=self._run, args=(process,), name=f"reward-{n}", daemon=True)
            for n, process in enumerate(self._processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, samples: Sequence[Unscored], first: int = 0) -> Scoring:
        """Begin to score samples, after those that were submitted before. first: the number of the first in its batch."""
        self.start()
        scoring = Scoring(samples, first)
        with self._lock:
            assert not self._closed, "the pool is closed"
            self._queue.extend(_Job(scoring, number) for number in range(len(samples)))
            self._work.notify_all()
        return scoring

    def check(self, scorings: Iterable[Scoring]) -> None:
        """Raise what `results` would, if it is known by now."""
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if self._settings.on_error == "zero":
                return
            for scoring in scorings:
                for at, (sample, result) in enumerate(zip(scoring.samples, scoring.results, strict=True)):
                    if result is not None and result.failure is not None:
                        raise UserError(
                            f"sample {scoring.first + at}, {sample.response[-80:]!r}, to {sample.source}: {result.failure.rstrip()}\n"
                            "reward.on_error=zero would count it as 0, and go on"
                        )

    def cancel(self, *scorings: Scoring) -> None:
        """Leave unscored what nobody waits for; a process that is busy with it is replaced."""
        with self._lock:
            for scoring in scorings:
                scoring.cancelled = True
            self._queue = deque(job for job in self._queue if not job.scoring.cancelled)
            for process in self._processes:
                if process.job is not None and process.job.scoring.cancelled:
                    process.kill()

    def results(self, scorings: Sequence[Scoring]) -> list[RewardResult]:
        """Wait for what was submitted, for `step_timeout_s` at most, and return it sample by sample, in the order of `scorings`.

        Raises:
            UserError: a sample could not be scored and `on_error` is stop, or the reward could not be loaded at all.
        """
        deadline = time.monotonic() + self._settings.step_timeout_s
        try:
            with self._lock:
                while not all(scoring.done for scoring in scorings):
                    self.check(scorings)
                    left = deadline - time.monotonic()
                    if left <= 0:
                        self._give_up(scorings)
                        break
                    self._news.wait(left)
                self.check(scorings)
        finally:
            self.cancel(*scorings)
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

    def _run(self, process: RewardProcess) -> None:
        try:
            try:
                self._serve(process)
            finally:
                process.kill()
        except BaseException as error:
            with self._lock:
                self._broken = self._broken or error
                self._news.notify_all()

    def _serve(self, process: RewardProcess) -> None:
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

    def _load(self, process: RewardProcess) -> None:
        process.forget()
        with self._lock:
            if self._closed:
                return
            process.start()
        try:
            told = process.answer(None)
        except ProcessEnded as ended:
            if process.killed:
                return
            raise UserError(f"reward {self._spec} {ended} while it was loaded; {process.printed()}") from None
        if told.stop is not None:
            raise UserError(told.stop)
        self._loaded = True

    def _score(self, process: RewardProcess, jobs: list[_Job]) -> int:
        """Ask for samples, and return how many were answered. The rest waits for another process where one fails."""
        process.ask(
            (one.prompt, one.response, one.answer, one.row if self._takes_row else None)
            for one in (job.scoring.samples[job.number] for job in jobs)
        )
        for at, job in enumerate(jobs):
            with self._lock:
                process.job = job
            failure = None
            try:
                told = process.answer(self._settings.timeout_s)
            except AnswerLate:
                failure = f"reward {self._spec} took longer than reward.timeout_s={self._settings.timeout_s:g}; its stacks are in {process.log}"
                process.tell_stacks()
            except ProcessEnded as ended:
                failure = f"reward {self._spec} {ended}; {process.printed()}"
            with self._lock:
                process.job = None
                if failure is not None:
                    blamed = not process.killed  # by us, for another sample's sake
                    process.kill()
                    if blamed:
                        self._note(job, RewardResult(0.0, {}, failure=failure))
                    rest = jobs[at + blamed :]
                    self._queue.extendleft(one for one in reversed(rest) if not one.scoring.cancelled)
                    self._work.notify_all()
                    return at
                if told.stop is not None:
                    raise UserError(told.stop)
                nothing = RewardResult(0.0, failure=f"reward {self._spec} gave no number")
                self._note(job, told.result or nothing)
        return len(jobs)

    def _note(self, job: _Job, result: RewardResult) -> None:
        if job.scoring.cancelled or job.scoring.results[job.number] is not None:
            return  # it comes just when the step has given up waiting for it
        job.scoring.put(job.number, result)
        if job.scoring.done or (result.failure is not None and self._settings.on_error == "stop"):
            self._news.notify_all()
