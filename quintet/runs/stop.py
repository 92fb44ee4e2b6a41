"""A request to stop: SIGTERM, which clusters send some time before they take a machine away.

A run that saves checkpoints finishes its step, saves, and ends with exit code 143; a second SIGTERM ends it at once, as the
first one does with a run that saves none, and with anything that is no run yet: there it does what Ctrl-C does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from quintet.errors import Stopped


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is no request."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Terminated on SIGTERM for the length of the block, but where `StopRequest.on_sigterm` takes it, as Ctrl-C does
    KeyboardInterrupt; and that is what the block ends with, whatever errors it leads to on the way: some libraries make another of
    it, or fail to be imported once more. A signal that the caller handles, or ignores, is left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[type[KeyboardInterrupt]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(Terminated if number == signal.SIGTERM else KeyboardInterrupt)
        raise came[-1]

    left_to_us = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.getsignal(number) for number in left_to_us}
    ours = [number for number, handler in before.items() if handler is left_to_us[number]]
    try:
        for number in ours:
            signal.signal(number, handle)
        yield
    except BaseException as error:
        if came and not isinstance(error, came[0]):
            raise came[0] from error
        raise
    finally:
        for number in ours:
            signal.signal(number, before[number])


class StopRequest:
    """The request that the run stop at the end of a step.

    after_step: stop there, of the stage that ends the run, without being asked.
    """

    def __init__(self, after_step: tuple[str, int] | None = None) -> None:
        self.signalled = False
        self._after_step = after_step

    @property
    def reason(self) -> str:
        return "SIGTERM" if self.signalled else "the caller"

    def after(self, stage: str, step: int) -> bool:
        """Return whether to stop now that this step is done."""
        return self.signalled or self._after_step == (stage, step)

    @contextmanager
    def on_sigterm(self, *, saves: bool) -> Iterator[None]:
        """Take SIGTERM as a request for the length of the block; at once unless the run `saves`."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            at_once = self.signalled or not saves
            self.signalled = True
            if at_once:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise Stopped("ended by SIGTERM")

        before = signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
