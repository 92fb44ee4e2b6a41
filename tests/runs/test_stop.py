"""Ctrl-C and SIGTERM as requests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from quintet.errors import Stopped
from quintet.runs.stop import StopRequest, Terminated, interruptible


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two instructions of this thread


def twice(stop: StopRequest, number: int, *, steps_begun: bool) -> None:
    """Two signals, the second while the run is cleared away if the first one ends it."""
    with stop.on_signals():
        stop.steps_begun = steps_begun
        assert not stop.after("rl", 1)
        try:
            send(number)
            assert stop.after("rl", 1)
        finally:
            send(number)


@pytest.mark.parametrize("steps_begun", [True, False])
def test_sigterm_waits_for_a_step_until_it_comes_again(steps_begun):
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="ended by SIGTERM") as ended:
        twice(stop, signal.SIGTERM, steps_begun=steps_begun)
    assert ended.value.__context__ is None  # one of the two raised it, and no other was raised meanwhile
    assert (stop.reason, stop.exit_code, ended.value.exit_code) == ("SIGTERM", 143, 143)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("steps_begun", [True, False])
@pytest.mark.parametrize("around", [interruptible, nullcontext])
def test_ctrl_c_waits_for_a_step_until_it_comes_again(steps_begun, around, capfd):
    stop, before = StopRequest(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), around():
        twice(stop, signal.SIGINT, steps_begun=steps_begun)
    assert (stop.reason, stop.exit_code) == ("Ctrl-C", 130)
    said = "\nCtrl-C: the run ends after this step; once more ends it at once\n"
    assert capfd.readouterr().err == said * steps_begun
    assert signal.getsignal(signal.SIGINT) is before


def test_one_signal_after_the_other_ends_at_once():
    stop = StopRequest()
    stop.steps_begun = True
    with stop.on_signals():
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert stop.reason == "SIGTERM"


def test_a_ctrl_c_that_the_caller_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.on_signals():
            send(signal.SIGINT)
        assert stop.signalled is None
    finally:
        signal.signal(signal.SIGINT, before)


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
