"""Weights of any make, sent as a trainer sends them: by the channel, to each of a rollout's receivers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import torch

from quintet.rollout.base import Piece
from quintet.sync.buckets import ALIGNMENT, Entry, laid_out, slots
from quintet.sync.rendezvous import Rendezvous
from quintet.sync.senders import SharedMemorySender
from quintet.sync.shared_memory import SharedBuffer
from quintet.sync.source import ChannelSource
from quintet.sync.wire import Answer, Ticket
from tests.patience import BUSY
from tests.rollout.vllm.conftest import DEVICE

PATIENCE_S = 30.0 * BUSY


class Pieces(Protocol):
    """What is to be sent."""

    def pieces(self, receiver: int) -> Iterator[Piece]:
        """To the receiver of this number; who raises breaks off there."""
        ...


def update(rollout: Any, weights: Pieces) -> None:
    """Have a rollout take new weights."""
    ids = [f"receiver {number}" for number in range(len(rollout.receivers()))]
    tickets = _sender().submit(_expect, ids).result()
    sending = _sender().submit(_send, weights)
    try:
        rollout.update_weights(ChannelSource(tickets))
    finally:
        sending.result()


@cache
def _sender() -> Executor:
    """On a GPU a process cannot open what it shares itself."""
    if DEVICE == "cpu":
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def end() -> None:
    """Let the process that shares, if there is one, come to its end."""
    if _sender.cache_info().currsize:
        _sender().shutdown()
        _sender.cache_clear()


_door: Rendezvous


def _expect(ids: list[str]) -> list[Ticket]:
    global _door
    _door = Rendezvous("127.0.0.1", PATIENCE_S)
    plan = _door.expect(ids)
    return [Ticket(one, _door.address, plan, _door.key, PATIENCE_S) for one in ids]


def _send(weights: Pieces) -> None:
    here, missing = _door.meet()
    _door.close()
    assert not missing
    with ThreadPoolExecutor(len(here)) as threads:
        list(threads.map(lambda n: _one(f"receiver {n}", n, here, weights), range(len(here))))


def _one(who: str, number: int, here: Any, weights: Pieces) -> None:
    """A piece is a bucket, of which the memory is another's as soon as it is taken."""
    sent, broken = [], False
    try:
        sent.extend((one, one.tensor.clone()) for one in weights.pieces(number))
    except Exception:
        broken = True
    buckets = [laid_out([Entry(one.name, one.shape, one.box, tensor.dtype)]) for one, tensor in sent]
    _, (room, _) = slots([one.nbytes for one in buckets], 0)
    outlet = SharedMemorySender([who], buckets, PATIENCE_S)
    memory = [SharedBuffer(nbytes, torch.device(DEVICE)) for nbytes in (room, ALIGNMENT)]
    outlet.meet(here, {})
    shown = tuple((one.handle, one.nbytes) for one in memory)
    outlet.open(Answer(memory=shown, device=DEVICE))
    for turn, (_, tensor) in enumerate(sent):
        buckets[turn].views(memory[0].bytes)[0].copy_(tensor)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        outlet.offer(turn, 0, memory[0].bytes)
        outlet.wait(turn)
    memory[0].bytes.zero_()
    if not broken:
        outlet.finish()
    outlet.close()
    for one in memory:
        one.close()
