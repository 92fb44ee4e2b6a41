"""Channels that end badly, with real processes: nobody takes for new weights what is not, nobody waits for the dead, and no
memory is taken from under a reader."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.sync.senders import ProcessGroupSender
from quintet.sync.server import ReceiverSpec, WeightServer
from quintet.sync.wire import Answer, Hello
from tests.patience import BUSY
from tests.sync.one_rank import NAMES, boxes, server_of, shards, shared_memory, shared_memory_left
from tests.sync.receivers import LoraSlots

pytestmark = pytest.mark.usefixtures("alone")
KINDS = [pytest.param(True, id="colocated"), pytest.param(False, id="separate")]
AT_ONCE_S = 15 * BUSY
"""Far less than the time limits of the tests that look at it."""


def plan(server: WeightServer, who: Sequence[str], colocated: bool) -> Any:
    return server.plan([ReceiverSpec(one, boxes(*NAMES), colocated) for one in who])


def same(found: Any, plus: float) -> bool:
    assert isinstance(found, dict), found
    return all(bool((found[name] == number + plus).all()) for number, name in enumerate(NAMES))


def ended_with(found: Any, *words: str) -> bool:
    """Whether it raised a SyncFailure that says so."""
    assert isinstance(found, str), "it took them for whole"
    return "quintet.errors.SyncFailure: " in found and all(one in found for one in words)


@pytest.mark.slow
@pytest.mark.parametrize("colocated", KINDS)
def test_one_that_was_stopped_does_not_take_old_and_new_for_one(beside: LoraSlots, colocated):
    """It stands still, holding a bucket, while the trainer gives it up, and hands the next weights to another."""
    held = shards()
    server = server_of(held, timeout_s=2.0 * BUSY)
    process = beside.start("stands", [0], 0, how=signal.SIGSTOP)
    beside.start("goes", [0, 1])
    beside.hand(0, plan(server, ["stands", "goes"], colocated))
    served = server.serve()
    assert "stands" in served.lost
    if colocated:
        assert served.lost == {"stands": "it took nothing for 8 s"}
        assert same(beside.took(0, "goes"), 0)
        assert shared_memory() > 0  # it has it mapped, and may read it at any time
    else:
        assert ended_with(beside.took(0, "goes"), "receiver goes: the trainer gave it up")
    for shard in held:
        shard.view.add_(10)
    beside.hand(1, plan(server, ["goes"], colocated))
    assert server.serve().lost == {}
    assert same(beside.took(1, "goes"), 10)
    os.kill(process.pid, signal.SIGCONT)
    assert ended_with(beside.took(0, "stands"), "receiver stands: the trainer gave it up")
    process.join()
    server.close()
    assert shared_memory_left() == 0


@pytest.mark.parametrize("joining", [False, True], ids=["sending", "joining"])
def test_the_group_of_one_that_dies_does_not_wait_for_it(beside: LoraSlots, joining):
    """Its mates and the trainer know at once, by name; and the mates get all of the next weights, in another group."""
    held = shards()
    server = server_of(held, timeout_s=300.0)
    mates = ["a mate", "another"]
    beside.start("dies", [0], 0, joining=joining)
    for one in mates:
        beside.start(one, [0, 1])
    tickets = plan(server, ["dies", *mates], colocated=False)
    beside.hand(0, tickets)
    began = time.monotonic()
    served = server.serve()
    told = [beside.took(0, one) for one in mates]
    assert time.monotonic() - began < AT_ONCE_S
    assert all(ended_with(one, "of its process group dies went away") for one in told)
    assert served.lost["dies"].startswith("its connection closed")
    assert {served.lost[one] for one in mates} == {"of its process group dies went away"}
    for shard in held:
        shard.view.add_(10)
    beside.hand(1, plan(server, mates, colocated=False))
    assert server.serve().lost == {}
    assert all(same(beside.took(1, one), 10) for one in mates)
    server.close()


def test_one_that_is_gone_when_its_group_is_formed_is_not_waited_for():
    """It came, and died before it was greeted; the group would have had a place for it."""
    store: Any = SimpleNamespace(host="127.0.0.1", port=1)
    outlet = ProcessGroupSender(["dies", "lives"], [], 300.0, store, "gloo")
    ends = {one: Pipe() for one in ("dies", "lives")}
    outlet.meet({one: (mine, Hello(one, "plan", False, None)) for one, (mine, _) in ends.items()}, {})
    ends["dies"][1].close()
    began = time.monotonic()
    outlet.open(Answer())
    assert time.monotonic() - began < AT_ONCE_S
    assert outlet.lost["dies"].startswith("its connection closed")
    assert outlet.lost["lives"] == "of its process group dies went away"
    outlet.close()


@pytest.mark.parametrize("colocated", KINDS)
def test_a_trainer_that_fails_on_the_way_is_told_to_its_receivers(beside: LoraSlots, colocated):
    held = shards()
    server = server_of(held, timeout_s=300.0)
    beside.start("waits", [0])
    beside.hand(0, plan(server, ["waits"], colocated))

    def part(box: Any) -> torch.Tensor:
        raise RuntimeError("no such part")

    held[2].part = part  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="no such part"):
        server.serve()
    assert ended_with(beside.took(0, "waits"), "receiver waits: the trainer gave it up: the trainer failed")
    assert time.monotonic() - began < AT_ONCE_S
    server.close()
