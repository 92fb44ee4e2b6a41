"""Calls under way: waiting for the ranks of one worker group, or of several at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quintet.cluster import ray_compat
from quintet.cluster.failures import Failure
from quintet.cluster.progress import FIRST_POST_S
from quintet.errors import QuintetError, WorkerFailure

import ray  # isort: skip

if TYPE_CHECKING:
    from quintet.cluster.group import WorkerGroup

WATCH_EVERY_S = 0.5
LOOK_EVERY_S = 5.0  # at the processes that are waited for
GRACE_AFTER_CAUSE_S = 0.3  # for further failures, once one is known that explains the others
GRACE_AFTER_ECHO_S = 3.0  # for the cause, once a collective was cut off, which can only be an echo
GRACE_AFTER_TIMEOUT_S = 1.0  # for the other ranks' time limits, which began at about the same time
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class PendingCall(Generic[R_co]):
    """A call on its way. owners: the ranks whose results count, in the order of the results; single: there is one, which is no
    list."""

    def __init__(
        self,
        group: WorkerGroup,
        refs: dict[int, list[Any]],
        owners: Sequence[int],
        phase: str,
        single: bool = False,
    ) -> None:
        self._group = group
        self._refs = refs
        self._owners = owners
        self._phase = phase
        self._single = single
        self._values: dict[int, Any] = {}
        self._failures: list[Failure] = []
        self._error: QuintetError | None = None
        self._began = self._looked = time.monotonic()
        self.waiting = {refs[0]: rank for rank, refs in self._refs.items()}
        """Ranks that have not answered, by what they will answer with."""
        self.deadline: float | None = None
        """Once a rank has failed: how long to wait for what explains it."""
        self.others: Callable[[], QuintetError | None] = lambda: None
        """What others tell of it, once they have given it up: then no answer is waited for."""
        self.heard: Callable[[int, Any], None] = lambda rank, piece: None
        """Told what a rank of a streaming call yields, while it is waited for."""

    def result(self, watch: Callable[[], None] | None = None) -> R_co:
        """Wait for every rank, or for the first failure and a short while for what explains it.

        `watch` is called about twice a second meanwhile.
        """
        return results([self], watch)[0]

    def take(self, ref: Any) -> None:
        """Note the answer of one rank, which has come."""
        rank = self.waiting.pop(ref)
        self._group.answered(rank)
        failure, self._values[rank] = self._answer(rank, ref)
        if failure is not None:
            self._note(failure)
        if not self.waiting and time.monotonic() - self._began >= FIRST_POST_S:
            self._group.forget_posts()

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to wait for."""
        return not self.waiting or (self.deadline is not None and time.monotonic() >= self.deadline)

    @property
    def failed(self) -> bool:
        return bool(self._failures) or self._error is not None

    @property
    def died(self) -> bool:
        """Whether a process of the call is gone."""
        return any(failure.died for failure in self._failures)

    @property
    def echoes(self) -> bool:
        """Whether all that failed in the call may come of another group's failure."""
        return all(failure.communication for failure in self._failures)

    def look(self) -> None:
        """Give it up if others have, or if a process of it has been stopped for too long."""
        given_up = self.others()
        if given_up is not None:
            self._error, self.deadline = given_up, time.monotonic()
        elif time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._looked = time.monotonic()
            for failure in self._group.stalled(list(self.waiting.values()), self._phase):
                self.waiting = {ref: rank for ref, rank in self.waiting.items() if rank != failure.rank}
                self._note(failure)

    def at_work(self, within_s: float) -> list[int]:
        """Ranks that are not done with it, after so long at most; may be asked by any thread."""
        waiting = dict(self.waiting)
        if not waiting:
            return []
        with ray_compat.signals_pass():
            _, left = ray.wait(list(waiting), num_returns=len(waiting), timeout=within_s)
        return [waiting[ref] for ref in left]

    def error(self) -> QuintetError:
        """Return the error that tells of the ranks that failed."""
        if self._error is None and self.echoes:
            self._error = self.others()
        if self._error is None:
            failed = {failure.rank for failure in self._failures}
            returned = [rank for rank in self._values if rank not in failed]
            self._error = self._group.fail(self._failures, self._phase, list(self.waiting.values()), returned)
        return self._error

    def value(self) -> R_co:
        """Return the caller's value, once every rank has answered."""
        told: Any = [
            (self._values[rank], *refs) if (refs := self._refs[rank][1:]) else self._values[rank]
            for rank in self._owners
        ]
        found: R_co = told[0] if self._single else told
        return found

    def _note(self, failure: Failure) -> None:
        self._failures.append(failure)
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + _grace(failure))

    def _answer(self, rank: int, ref: Any) -> tuple[Failure | None, Any]:
        try:
            return self._outcome(rank, ref)
        except ray.exceptions.RayActorError as error:
            return self._group.death(rank, error), None
        except ray.exceptions.RayError as error:
            # The outcome itself did not travel: it cannot be pickled, or an argument is lost.
            return Failure(rank, f"{type(error).__name__}: {error}".split("\n", 1)[0], str(error)), None

    def _outcome(self, rank: int, ref: Any) -> tuple[Failure | None, Any]:
        outcome: tuple[Failure | None, Any] = ray.get(ref)
        return outcome


class StreamingCall(PendingCall[R_co]):
    """A call whose ranks tell of what they do on the way, to `heard`: see `RankActor.stream`."""

    def __init__(
        self,
        group: WorkerGroup,
        streams: dict[int, Any],
        owners: Sequence[int],
        phase: str,
        single: bool = False,
    ) -> None:
        refs = {rank: [stream.completed()] for rank, stream in streams.items()}
        super().__init__(group, refs, owners, phase, single)
        self._streams = streams
        self._outcomes: dict[int, tuple[Failure | None, Any]] = {}

    def look(self) -> None:
        for rank in self.waiting.values():
            with suppress(ray.exceptions.RayError):  # of a process that died: its end is told in another way
                self._listen(rank)
        super().look()

    def _listen(self, rank: int) -> None:
        """Hear what has come, and note the outcome once that has, with references to what follows it."""
        stream = self._streams[rank]
        while rank not in self._outcomes and ray.wait([stream], timeout=0)[0]:
            piece = ray.get(next(stream))
            if isinstance(piece, list):
                self._outcomes[rank], others = piece
                self._refs[rank] += [next(stream) for _ in range(others)]
            else:
                self.heard(rank, piece)

    def _outcome(self, rank: int, ref: Any) -> tuple[Failure | None, Any]:
        ray.get(ref)  # raises what ended the process
        while rank not in self._outcomes:
            self._listen(rank)
        return self._outcomes[rank]


def first_answers(refs: Sequence[Any], group: str, others: Callable[[], QuintetError | None]) -> list[Any]:
    """Return what processes answer before they are ranks, when Ray's word is all that is known of one that ends.

    `others` is asked about twice a second whether the start is given up, and why.
    """
    answers: dict[Any, Any] = {}
    waiting = list(refs)
    while waiting:
        if (given_up := others()) is not None:
            raise given_up
        with ray_compat.signals_pass():
            done, waiting = ray.wait(waiting, num_returns=1, timeout=WATCH_EVERY_S)
        ray_compat.check()
        try:
            answers |= {ref: ray.get(ref) for ref in done}
        except ray.exceptions.RayError as error:
            died = isinstance(error, ray.exceptions.RayActorError)
            what = "ended while it started" if died else "did not start"
            said = str(error).strip().split("\n", 1)[0].rstrip(".")
            trace = str(error) if isinstance(error, ray.exceptions.RayTaskError) else None
            text = f"{group}: a process {what}: {said}"
            raise WorkerFailure(text, phase="start", traceback=trace) from error
    return [answers[ref] for ref in refs]


def results(calls: Sequence[PendingCall[R]], watch: Callable[[], None] | None = None) -> list[R]:
    """Return the values of calls to several groups that work at once.

    Raises the error of the first that fails; a process that died is the cause rather than what others say of it, and any
    other failure rather than weights that stopped coming.
    """
    _wait(calls, watch, patient=False)
    failed = [call for call in calls if call.failed]
    if failed:
        raise min(failed, key=lambda call: (not call.died, call.echoes)).error()
    return [call.value() for call in calls]


def outcomes(
    calls: Sequence[PendingCall[R]], watch: Callable[[], None] | None = None
) -> list[R | QuintetError]:
    """Return the values of calls to several groups, each waited for to its end; of one that failed, its error."""
    _wait(calls, watch, patient=True)
    return [call.error() if call.failed else call.value() for call in calls]


def _wait(calls: Sequence[PendingCall[Any]], watch: Callable[[], None] | None, *, patient: bool) -> None:
    """Until every call has ended. Not patient: a failure of one gives the others only the time to explain it."""
    while True:
        open_calls = [call for call in calls if not call.ended]
        limits = [call.deadline for call in open_calls if call.deadline is not None]
        if not patient and any(call.failed for call in calls):
            if any(call.died for call in calls) and not limits:
                return
            limits.append(_told_by_others(calls))
        waiting = {ref: call for call in open_calls for ref in call.waiting}
        left = max(0.0, min(limits) - time.monotonic()) if limits else None
        if not waiting or (left == 0.0 and not patient):
            return
        turn = WATCH_EVERY_S if left is None else min(left, WATCH_EVERY_S)
        with ray_compat.signals_pass():
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=turn)
        ray_compat.check()
        if done:
            waiting[done[0]].take(done[0])
            continue
        for call in open_calls:
            call.look()
        if watch is not None and left is None:
            watch()


def _told_by_others(calls: Sequence[PendingCall[Any]]) -> float:
    """Until when other groups may still tell the cause of a failure."""
    first = min(call.deadline for call in calls if call.deadline is not None)
    return first if len(calls) == 1 else first + GRACE_AFTER_ECHO_S


def _grace(failure: Failure) -> float:
    if not failure.communication:
        return GRACE_AFTER_CAUSE_S
    return GRACE_AFTER_TIMEOUT_S if failure.timed_out else GRACE_AFTER_ECHO_S
