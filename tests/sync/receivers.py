"""Receivers in processes of their own, which can die, and the ranks that serve them; they find each other's tickets in files."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quintet.models.mcore import whole_box
from quintet.sync import source
from quintet.sync.wire import Ticket
from tests.oracle.pool import FORKED
from tests.patience import BUSY

PATIENCE_S = 60.0 * BUSY
TIMEOUT_S = 3.0 * BUSY
"""Of the trainer that waits for a receiver which never comes."""


def put(path: Path, value: Any) -> None:
    """Write a file that is whole when it is there."""
    begun = path.with_suffix(".begun")
    begun.write_bytes(pickle.dumps(value))
    begun.rename(path)


def get(path: Path) -> Any:
    """The same, when it is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)
    return pickle.loads(path.read_bytes())


def receive(
    root: Path,
    who: str,
    syncs: list[int],
    dies_in: int | None = None,
    how: signal.Signals = signal.SIGKILL,
    joining: bool = False,
) -> None:
    """Take part in these syncs and tell what came of each: tensors by name, or the error's text. In one of them it may kill or
    stop itself, holding a bucket, or on its way into a process group."""
    for number in syncs:
        ticket = get(root / f"ticket-{number}-{who}")
        found: dict[str, torch.Tensor] = {}
        made = source.TransferGroup
        if joining and number == dies_in:
            source.TransferGroup = lambda *_: os.kill(os.getpid(), how)  # type: ignore[assignment, misc]
        try:
            for batch in source.ChannelSource([ticket]).batches(0):
                for piece in batch:
                    whole = found.setdefault(piece.name, torch.full(piece.shape, float("nan")))
                    whole[tuple(slice(*ends) for ends in piece.box)] = piece.tensor
                if number == dies_in:
                    dies_in = None
                    os.kill(os.getpid(), how)
            put(root / f"took-{number}-{who}", found)
        except Exception:
            put(root / f"took-{number}-{who}", traceback.format_exc())
        source.TransferGroup = made  # type: ignore[misc]


class LoraSlots:
    """Receivers beside the ranks."""

    def __init__(self, root: Path) -> None:
        self.root, self.processes = root, []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(FORKED)

    def start(self, who: str, syncs: list[int], dies_in: int | None = None, **how: Any) -> Any:
        return self.run(receive, self.root, who, syncs, dies_in, **how)

    def run(self, function: Callable[..., None], *args: Any, **how: Any) -> Any:
        process = self._context.Process(target=function, args=args, kwargs=how)
        process.start()
        self.processes.append(process)
        return process

    def hand(self, number: int, tickets: list[Ticket]) -> None:
        """Tickets to those who wait for them."""
        for ticket in tickets:
            put(self.root / f"ticket-{number}-{ticket.receiver}", ticket)

    def took(self, number: int, who: str) -> Any:
        return get(self.root / f"took-{number}-{who}")


def train(
    path: Path, root: Path, plans: dict[int, list[list[tuple[str, str | None]]]], syncs: int, colocated: bool
) -> list[tuple[Any, int]]:
    """On one rank: serve so often, planning anew before some: of each rank, ids and the tensor that each wants alone, or
    None for all. Returns what was served, and the files and sockets that were open afterwards."""
    from quintet.engine.engine import DTYPES
    from quintet.rollout.base import Wanted
    from quintet.sync.server import ReceiverSpec, WeightServer
    from tests.sync import layouts

    engine = layouts.engine_of(path, {"tp": dist.get_world_size()})
    full = {one.name: whole_box(one.shape) for one in engine.shard_map()}
    where = (engine.shape, DTYPES["fp32"], torch.device("cpu"), layouts.BUCKET_MIB)
    server = WeightServer(engine.shard_map, *where, timeout_s=TIMEOUT_S)
    found = []
    for number in range(syncs):
        if number in plans:
            specs = [
                ReceiverSpec(who, None if name is None else [Wanted(name, full[name])], colocated)
                for who, name in plans[number][dist.get_rank()]
            ]
            tickets = {one.receiver: one for one in server.plan(specs)}
        for who, ticket in tickets.items():
            put(root / f"ticket-{number}-{who}", ticket)
        served = server.serve()
        found.append((served, len(list(Path("/proc/self/fd").iterdir()))))
    server.close()
    return found
