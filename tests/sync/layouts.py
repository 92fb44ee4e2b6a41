"""What ranks do in tests of weight sync: each trains in one layout, and takes weights, in a thread, that its neighbour serves.

So every channel is between two processes, and no process more is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quintet.engine import build
from quintet.engine.engine import DTYPES, Engine
from quintet.engine.weights.hf import check_hf, fill_hf
from quintet.engine.weights.shards import Shard, shard_map
from quintet.models import read_shape
from quintet.recipe import schema
from quintet.rollout.base import Piece, Wanted
from quintet.sync.server import ReceiverSpec, Served, WeightServer
from quintet.sync.source import ChannelSource
from tests.patience import BUSY

BUCKET_MIB = 1 / 16
"""Tiny models are 0.3 to 3 MiB."""


class Taker(threading.Thread):
    """Takes weights from a source, keeping copies or writing them to shards. Raises what went wrong when it is joined."""

    def __init__(self, source: ChannelSource, use: Callable[[Piece], None], receiver: int = 0) -> None:
        super().__init__(daemon=True)
        self.source, self.use, self.receiver = source, use, receiver
        self.failure: BaseException | None = None
        self.device = build.device()
        self.start()

    def run(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            for batch in self.source.batches(self.receiver):
                for piece in batch:
                    self.use(piece)
        except BaseException as error:
            self.failure = error

    def finish(self) -> None:
        self.join(60)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure


def engine_of(path: Path, layout: dict[str, Any], dtype: str = "fp32") -> Engine:
    shape, settings = read_shape(path), schema.Engine()
    engine = Engine(shape, schema.Layout(**layout), engine=settings, optimizer=None, dtype=dtype)
    engine.load_hf(path)
    return engine


def shards_of(engine: Engine, layout: dict[str, Any]) -> list[Shard]:
    """Of a second model in another layout on the same ranks, with undefined weights."""
    chosen = schema.Layout(**layout)
    mesh = build.mesh_of(chosen, dist.get_world_size())
    model = build.build_chunks(engine.shape, chosen, mesh, engine.dtype, engine.recipe)
    return shard_map(model, engine.shape, mesh)


def writer(shards: Iterable[Shard]) -> Callable[[Piece], None]:
    """Writes pieces to the shards that they are parts of."""
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append(shard)

    def write(piece: Piece) -> None:
        for shard in by_name[piece.name]:
            if all(a <= c and d <= b for (a, b), (c, d) in zip(shard.box, piece.box, strict=True)):
                part = shard.part(piece.box)
                part.copy_(piece.tensor.reshape(part.shape))

    return write


def exchange(
    server: WeightServer, spec: ReceiverSpec, use: Callable[[Piece], None]
) -> tuple[Served, ChannelSource]:
    """Plan for one receiver, and sync once: this rank takes what its neighbour serves."""
    tickets: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tickets, server.plan([spec]))
    source = ChannelSource(tickets[dist.get_rank() - 1])
    taker = Taker(source, use)
    served = server.serve()
    taker.finish()
    return served, source


def reshard(
    path: Path, train: dict[str, Any], rollout: dict[str, Any], colocated: bool = True
) -> list[tuple[str, bool]]:
    """On one rank: from the training layout to a rollout's, through channels; what arrived beside what a load gives."""
    engine = engine_of(path, train)
    moved, loaded = shards_of(engine, rollout), shards_of(engine, rollout)
    fill_hf(loaded, check_hf(engine.shape, path))
    for shard in moved:
        shard.view.fill_(float("nan"))
    wanted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, [Wanted(s.name, s.box) for s in moved])
    server = WeightServer(
        engine.shard_map, engine.shape, DTYPES["fp32"], build.device(), BUCKET_MIB, timeout_s=30.0 * BUSY
    )
    # Rank r's rollout is served by the rank before it.
    rank = dist.get_rank()
    spec = ReceiverSpec(f"rollout {rank}", wanted[(rank + 1) % len(wanted)], colocated)
    served, _ = exchange(server, spec, writer(moved))
    server.close()
    assert not served.lost, served
    return [(a.name, torch.equal(a.read(), b.read())) for a, b in zip(moved, loaded, strict=True)]


def whole(
    path: Path, train: dict[str, Any], colocated: bool = True
) -> tuple[dict[str, torch.Tensor], Served]:
    """On one rank: the full tensors that arrive from the neighbour."""
    engine = engine_of(path, train)
    server = WeightServer(
        engine.shard_map, engine.shape, DTYPES["fp32"], build.device(), BUCKET_MIB, timeout_s=30.0 * BUSY
    )
    spec = ReceiverSpec(f"rollout {dist.get_rank()}", None, colocated)
    found: dict[str, torch.Tensor] = {}

    def keep(piece: Piece) -> None:
        assert piece.name not in found
        assert tuple(piece.tensor.shape) == piece.shape
        found[piece.name] = piece.tensor.clone().cpu()

    served, _ = exchange(server, spec, keep)
    server.close()
    return (found if dist.get_rank() == 0 else {}), served
