"""SIGTERM as a request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from quintet.errors import Stopped
from quintet.runs.stop import StopRequest, Terminated, interruptible


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)  # the handler runs between two instructions of this thread


def twice(stop: StopRequest, *, saves: bool) -> None:
    """Two SIGTERMs, the second while the run is cleared away if the first one ends it."""
    with stop.on_sigterm(saves=saves):
        assert not stop.after("rl", 1)
        try:
            terminate()
            assert stop.after("rl", 1)
        finally:
            terminate()


@pytest.mark.parametrize("saves", [True, False])
def test_it_waits_for_a_save_until_it_comes_again(saves):
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="ended by SIGTERM") as ended:
        twice(stop, saves=saves)
    assert ended.value.__context__ is None  # one of the two raised it, and no other was raised meanwhile
    assert stop.reason == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def unhandled() -> Iterator[None]:
    """SIGTERM as it is in a program that has not started: Ray handles it in a process that is its driver."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("unhandled")
def test_what_a_signal_leads_to_ends_as_the_signal():

    def swallowed(number):
        with interruptible():
            try:
                os.kill(os.getpid(), number)
                time.sleep(0.01)
            except KeyboardInterrupt:
                raise ImportError("cannot load module more than once") from None

    with pytest.raises(Terminated):
        swallowed(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as ended:
        swallowed(signal.SIGINT)
    assert not isinstance(ended.value, Terminated)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(ImportError), interruptible():
        raise ImportError


def test_stopping_after_a_step_needs_no_signal():
    stop = StopRequest(("rl", 3))
    assert [stop.after(*place) for place in (("sft", 3), ("rl", 2), ("rl", 3))] == [False, False, True]
