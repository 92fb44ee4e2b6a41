"""A limit on the time it takes to look through a recipe, whatever it holds.

Processor time: neither a busy machine nor a slow disk uses it up.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeUp(BaseException):
    """The time limit is over: no `Exception`, which code on the way might take for a failure of its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the body once it has used so much processor time. For the main thread."""

    def up(number: int, frame: FrameType | None) -> None:
        raise TimeUp(f"{seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, up)
    # Again and again: an exception in a destructor, or in a callback of the garbage collector, is lost.
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def stop_the_clock() -> None:
    """Raise no further TimeUp: for those who catch one and go on."""
    signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def no_time_limit() -> Iterator[None]:
    """Stop the clock while the body runs: a user's own code may take its time."""
    left = signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, *left)
