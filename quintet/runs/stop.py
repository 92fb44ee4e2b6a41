"""A request to stop: Ctrl-C (SIGINT), or SIGTERM, which clusters send some time before they take a machine away.

The first of either lets a run that trains finish its step and write what it has, and ends it with exit code 130 or 143; a second
one ends it at once. So does the first with anything that is no run yet, or has taken no step: there is nothing to keep.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from quintet.errors import Stopped

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is no request."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Terminated on SIGTERM for the length of the block, but where `StopRequest.on_signals` takes it, as Ctrl-C does
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

    after_step: stop there, of the stage that ends the run, without being asked. `steps_begun` is to be set once there is something
    to wait for.
    """

    def __init__(self, after_step: tuple[str, int] | None = None) -> None:
        self.signalled: int | None = None
        """The signal that asked."""
        self.steps_begun = False
        self._after_step = after_step

    @property
    def reason(self) -> str:
        return "the caller" if self.signalled is None else NAMES[signal.Signals(self.signalled)]

    @property
    def exit_code(self) -> int:
        return 128 + (self.signalled or signal.SIGTERM)

    def after(self, stage: str, step: int) -> bool:
        """Return whether to stop now that this step is done."""
        return self.signalled is not None or self._after_step == (stage, step)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take Ctrl-C and SIGTERM as requests for the length of the block; at once before `steps_begun`, and when one comes again.
        A Ctrl-C that the caller ignores, or makes something else of, is left alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            at_once = self.signalled is not None or not self.steps_begun
            self.signalled = self.signalled or number
            if not at_once:
                with suppress(OSError):  # a terminal that is gone
                    os.write(
                        2,
                        f"\n{self.reason}: the run ends after this step; once more ends it at once\n".encode(),
                    )
                return
            if number == signal.SIGINT and callable(of_ctrl_c):
                of_ctrl_c(number, frame)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise Stopped("ended by SIGTERM")

        of_ctrl_c = signal.getsignal(signal.SIGINT)
        with ExitStack() as undo:
            undo.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, handle))
            if of_ctrl_c is signal.default_int_handler or getattr(of_ctrl_c, "__module__", None) == __name__:
                undo.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, handle))
            yield
