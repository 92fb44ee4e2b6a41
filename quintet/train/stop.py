"""A request to stop: SIGTERM, which clusters send some time before they take a machine away.

A run that saves checkpoints finishes its step, saves, and ends with exit code 143; a second SIGTERM ends it at once, as the
first one does with a run that saves none.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from quintet.errors import Stopped


class StopRequest:
    """Whether the run is to stop at the end of a step.

    after_step: stop there, of the stage that ends the run, without being asked.
    """

    def __init__(self, after_step: tuple[str, int] | None = None) -> None:
        self.signalled = False
        self._after_step = after_step

    @property
    def reason(self) -> str:
        return "SIGTERM" if self.signalled else "the caller"

    def after(self, stage: str, step: int) -> bool:
        """Whether to stop now that this step is done."""
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
