"""One trainer rank and its receivers: what overlaps, what memory there is, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.engine.weights.shards import Shard
from quintet.errors import SyncFailure, UserError
from quintet.models.mcore import whole_box
from quintet.rollout.base import Piece
from quintet.rollout.vllm.weights import Weights, check
from quintet.rollout.vllm.worker_models import WorkerModels
from quintet.sync.server import ReceiverSpec, WeightServer
from quintet.sync.source import ChannelSource
from tests.rollout.vllm.test_weights import Fused, Repacked, weights_of
from tests.sync.layouts import Taker
from tests.sync.one_rank import (
    NAMES,
    ROWS,
    Watched,
    boxes,
    server_of,
    shards,
    shared_memory,
    shared_memory_left,
)


def one_sync(server: WeightServer, use: Callable[[Piece], None], colocated: bool = True) -> Any:
    source = ChannelSource(server.plan([ReceiverSpec("rollout-0/0", boxes(*NAMES), colocated)]))
    taker = Taker(source, use)
    served = server.serve()
    return served, taker


pytestmark = pytest.mark.usefixtures("alone")
KINDS = [pytest.param(True, id="colocated"), pytest.param(False, id="separate")]


@pytest.mark.parametrize("colocated", KINDS)
def test_the_next_bucket_is_packed_while_one_is_loaded_and_no_third(colocated):
    held = shards()
    _, b, c, d = (one.read for one in held)
    seen: list[bool] = []

    def use(piece: Piece) -> None:
        assert (piece.tensor == float(NAMES.index(piece.name))).all()
        if piece.name == "a":  # held until the next is packed: without overlap that would be never
            seen.append(b.wait(15))
            if colocated:  # a process group's receiver has two buckets of its own to be filled meanwhile
                seen.append(not c.wait(0.3))
        if piece.name == "b":
            seen.append(c.wait(15))
            if colocated:
                seen.append(not d.wait(0.3))

    server = server_of(held)
    served, taker = one_sync(server, use, colocated)
    taker.finish()
    server.close()
    assert seen == [True] * (4 if colocated else 2)
    assert (served.buckets, served.lost) == (4, {})


@pytest.mark.parametrize("colocated", KINDS)
def test_a_bucket_stays_what_it_is_while_it_is_read(colocated):
    """Also where every tensor is larger than a bucket, and all are in the same memory one after another."""
    large = []
    for number in range(4):
        size = (4 * ROWS, 256)
        one = Watched(f"e{number}", size, ((0, size[0]), (0, size[1])), torch.full(size, float(number)))
        one.read = threading.Event()
        large.append(one)
    server = server_of(large)
    source = ChannelSource(server.plan([ReceiverSpec("r", None, colocated)]))
    seen = []

    def use(piece: Piece) -> None:
        time.sleep(0.1)  # long enough for the next to arrive
        seen.append((piece.name, piece.tensor.min().item(), piece.tensor.max().item()))

    taker = Taker(source, use)
    server.serve()
    taker.finish()
    server.close()
    assert seen == [(f"e{number}", number, number) for number in range(4)]


@pytest.mark.parametrize("colocated", KINDS)
def test_a_receiver_that_wants_something_else_gets_that(colocated):
    """It remembers the buckets of the plan before."""
    server = server_of(shards())
    for wanted in (["a", "b"], ["c"], ["d", "a", "b"]):
        source = ChannelSource(server.plan([ReceiverSpec("r", boxes(*wanted), colocated)]))
        seen: list[tuple[str, float]] = []
        taker = Taker(source, lambda piece, to=seen: to.append((piece.name, piece.tensor.max().item())))
        server.serve()
        taker.finish()
        assert seen == [(name, NAMES.index(name)) for name in wanted]
    server.close()


def test_a_new_plan_gives_the_process_groups_of_the_old_one_up():
    server, groups = server_of(shards()), []
    for _ in range(3):
        _, taker = one_sync(server, lambda piece: None, colocated=False)
        taker.finish()
        (outlet,) = server._outlets
        groups.append(outlet._group)
    assert [group._group is not None for group in groups] == [False, False, True]
    server.close()
    assert groups[-1]._group is None


def test_two_buckets_are_in_memory_and_none_afterwards():
    held, most = shards(), [0]
    server = server_of(held)
    files = len(list(Path("/proc/self/fd").iterdir()))

    def use(piece: Piece) -> None:
        most[0] = max(most[0], shared_memory())

    for _ in range(3):
        _, taker = one_sync(server, use)
        taker.finish()
    del taker
    assert most[0] == 2 * (1 << 18)
    assert shared_memory() == 0
    server.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    # One tensor in a bucket of its own, and a bucket of the usual size.
    large = Watched("e", (1024, 256), ((0, 1024), (0, 256)), torch.zeros(1024, 256))
    large.read = threading.Event()
    most[0] = 0
    server = server_of([*held, large])
    source = ChannelSource(server.plan([ReceiverSpec("r", None, True)]))
    taker = Taker(source, use)
    server.serve()
    taker.finish()
    server.close()
    assert most[0] == (1 << 20) + (1 << 18)


def test_weights_that_change_are_new_at_the_next_sync_and_the_plan_stays():
    held = shards()
    server = server_of(held)
    source = ChannelSource(server.plan([ReceiverSpec("r", boxes("a"), True)]))
    for value in (1.0, 2.0):
        held[0].view.fill_(value)
        found: list[bool] = []
        taker = Taker(
            source, lambda piece, v=value, found=found: found.append(bool((piece.tensor == v).all()))
        )
        server.serve()
        taker.finish()
        assert found == [True]
    server.close()


def test_who_stops_early_or_is_slow_is_lost_by_name():
    server = server_of(shards(), timeout_s=2.0)

    def stop(piece: Piece) -> None:
        raise KeyError("no such weight here")

    served, taker = one_sync(server, stop)
    assert list(served.lost) == ["rollout-0/0"]
    assert "its connection closed" in served.lost["rollout-0/0"]
    with pytest.raises(KeyError, match="no such weight"):
        taker.finish()
    leave = threading.Event()
    served, taker = one_sync(server, lambda piece: leave.wait(10) and None)
    assert served.lost == {"rollout-0/0": "it took nothing for 2 s"}
    leave.set()
    with pytest.raises(
        SyncFailure, match="receiver rollout-0/0: the trainer gave it up: it took nothing for 2 s"
    ):
        taker.finish()
    server.close()


def test_tickets_of_another_plan_or_key_and_of_nobody_are_refused():
    server = server_of(shards())
    spec = ReceiverSpec("rollout-0/0", boxes("a"), True)
    (old,) = server.plan([spec])
    (ticket,) = server.plan([spec])
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()
    for wrong, said in (
        (old, "receiver rollout-0/0: its ticket is of an earlier plan"),
        (dataclasses.replace(ticket, key=b"x" * 32), "receiver rollout-0/0: its ticket has another key"),
        (dataclasses.replace(ticket, receiver="rollout-7/0"), "receiver rollout-7/0: its ticket is of"),
        (dataclasses.replace(ticket, address=nobody), "receiver rollout-0/0: no trainer answers"),
        (
            dataclasses.replace(ticket, timeout_s=1.0),
            "receiver rollout-0/0: nothing came from the trainer within 1 s",
        ),  # it does not serve
    ):
        with pytest.raises(SyncFailure, match=re.escape(said)):
            list(ChannelSource([wrong]).batches(0))
    server.close()
    with pytest.raises(SyncFailure, match="no trainer answers"):
        list(ChannelSource([ticket]).batches(0))
    with socket.create_server(nobody), pytest.raises(SyncFailure, match="did not greet it within 1 s"):
        list(ChannelSource([dataclasses.replace(ticket, address=nobody, timeout_s=1.0)]).batches(0))


@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "separate"])
def test_a_receiver_that_wants_nothing_is_served_that(colocated):
    """A pipeline stage without adapters, where adapters travel alone; with nobody else to serve, and beside another."""
    server = server_of(shards())
    for others in ([], [ReceiverSpec("other", boxes("a"), colocated)]):
        tickets = server.plan([ReceiverSpec("stage", [], colocated), *others])
        for _ in range(2):
            found: list[list[str]] = [[] for _ in tickets]
            takers = [
                Taker(ChannelSource([ticket]), lambda piece, names=names: names.append(piece.name))
                for ticket, names in zip(tickets, found, strict=True)
            ]
            served = server.serve()
            for taker in takers:
                taker.finish()
            assert served.lost == {}
            assert found == [[], *(["a"] for _ in others)]
    server.close()
    assert shared_memory_left() == 0


def test_what_cannot_be_handed_out_is_said_before_anything_moves():
    held = shards()
    server = server_of(held)
    with pytest.raises(UserError, match="receiver r wants z, which the engine does not hand out"):
        server.plan([ReceiverSpec("r", boxes("z"), True)])
    with pytest.raises(AssertionError, match="plan comes before serve"):
        server_of(held).serve()
    server.plan([])
    held[0].view.untyped_storage().resize_(0)
    with pytest.raises(UserError, match="weights are offloaded"):
        server.serve()
    server.close()


@pytest.mark.parametrize("model", [Fused, Repacked], ids=["copied", "loaded"])
def test_a_vllm_worker_gets_some_of_the_heads_that_share_a_kv_head(model):
    """Two workers, each with two of the four heads: they ask for them after a first sync of whole tensors. So small are
    buckets that they are cut as well."""
    workers = [model(rank, 2) for rank in range(2)]
    held = [Weights(WorkerModels(one), one.load, lambda name: False) for one in workers]
    named = weights_of(0)
    server = server_of(list(trained(named)), bucket_mib=64 / 2**20)
    for seed in range(3):
        for name, tensor in weights_of(seed).items():
            named[name].copy_(tensor)
        wanted = [one.wanted() if seed else None for one in held]
        if seed:
            heads = [{w.box[0] for w in parts if w.name == "layers.1.q"} for parts in wanted]
            assert heads == [{(0, 4)}, {(4, 8)}]
        specs = [ReceiverSpec(f"r{rank}", parts, True) for rank, parts in enumerate(wanted)]
        sources = [ChannelSource([ticket]) for ticket in server.plan(specs)]
        with ThreadPoolExecutor(2) as pool:
            taking = [
                pool.submit(one.take, source.batches(0)) for one, source in zip(held, sources, strict=True)
            ]
            assert server.serve().lost == {}
            check([one.result(60) for one in taking])
        for rank, one in enumerate(workers):
            expected = model(rank, 2)
            expected.load(named.items())
            assert all(
                torch.equal(*pair) for pair in zip(one.parameters(), expected.parameters(), strict=True)
            )
    server.close()


def trained(named: dict[str, torch.Tensor]) -> Iterator[Shard]:
    """One rank's shards of all these, q as the trainer has it: [KV heads, heads that share one, head_dim, hidden]."""
    for name, tensor in named.items():
        view = tensor.view(1, 4, 2, -1) if name.endswith(".q") else tensor
        yield Shard(name, tuple(tensor.shape), whole_box(tensor.shape), view)
