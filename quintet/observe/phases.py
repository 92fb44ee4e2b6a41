"""Seconds by phase. A phase within a phase takes its time from the outer one, so that phases add up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class PhaseTimer:
    """A timer of phases: `with phases("generate"): …` adds to that phase's seconds, of this lap and in total.

    A lap is what lies between two calls of `lap`: one training step, or one evaluation.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._mark = self._lap_start = self.started = clock()
        self._lap: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        """Seconds of each phase since the start."""
        self._earlier = 0.0
        self.failed_in: str | None = None
        """The innermost phase that an exception left."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._settle()
        self._open.append(phase)
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or phase
            raise
        finally:
            self._settle()
            self._open.pop()

    def lap(self) -> tuple[dict[str, float], float]:
        """Return the seconds by phase since the last lap, and all seconds since then, in no phase or in one."""
        self._settle()
        seconds, elapsed = self._lap, self._mark - self._lap_start
        self._lap, self._lap_start = {}, self._mark
        return seconds, elapsed

    def elapsed(self) -> float:
        """Return the seconds since the timer was made, and those of earlier starts of the run."""
        return self._earlier + self._clock() - self.started

    def add(self, seconds: float, by_phase: Mapping[str, float]) -> None:
        """Count what earlier starts of the run took."""
        self._earlier += seconds
        self.totals = {**by_phase, **{p: s + by_phase.get(p, 0.0) for p, s in self.totals.items()}}

    def _settle(self) -> None:
        """Give the time since the last mark to the innermost open phase."""
        now = self._clock()
        if self._open:
            phase = self._open[-1]
            for seconds in (self._lap, self.totals):
                seconds[phase] = seconds.get(phase, 0.0) + now - self._mark
        self._mark = now
