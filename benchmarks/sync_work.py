"""The two processes a GPU of the sync benchmark: a rank that trains, and beside it one that takes the weights.

Each does what the parent says through its pipe (`serve`), and answers with when it began and ended by the machine's clock.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engine_work import MODELS
from quintet.engine import build
from quintet.engine.copies import copy_all
from quintet.engine.engine import Engine
from quintet.engine.weights.fingerprint import fingerprints
from quintet.engine.weights.reshard import Owners, gather_holdings
from quintet.engine.weights.rounds import connect
from quintet.engine.weights.shards import Shard
from quintet.models.mcore import meet, whole_box
from quintet.recipe import schema
from quintet.rollout.base import Piece, Wanted
from quintet.rollout.native.weights import Weights
from quintet.sync.buckets import ALIGNMENT, Bucket, Entry, laid_out
from quintet.sync.export import Export, made
from quintet.sync.server import ReceiverSpec, WeightServer
from quintet.sync.source import ChannelSource


@dataclass(frozen=True)
class Setup:
    """One measurement. train, rollout: layouts over all ranks."""

    model: str
    device: str
    ranks: int
    train: dict[str, Any]
    rollout: dict[str, Any]
    whole: bool
    bucket_mib: int


@dataclass(frozen=True)
class Took:
    """Seconds of the machine's clock, and bytes that this rank handed out."""

    began: float
    ended: float
    bytes: int = 0


class _Side:
    """What both have: a device, a process group of their kind, a pipe to the parent and a line to each other."""

    def __init__(self, rank: int, setup: Setup, port: int, line: Connection) -> None:
        self.rank, self.setup, self.line = rank, setup, line
        gpu = setup.device == "cuda"
        self.device = torch.device("cuda", rank) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(self.device)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setup.ranks))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=setup.ranks,
        )
        self.shape = MODELS[setup.model].shape
        self.dtype = torch.bfloat16
        self.shards: list[Shard] = []

    def fingerprints(self) -> Any:
        """Of what this rank holds."""
        return fingerprints((one.name, one.shape, one.box, one.view) for one in self.shards)

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Trainer(_Side):
    """A rank of the engine: the model alone, with random weights."""

    def build(self) -> dict[str, tuple[int, ...]]:
        """The full shapes of what this rank holds."""
        layout = schema.Layout(**self.setup.train)
        self.engine = Engine(self.shape, layout, engine=schema.Engine(), optimizer=None, dtype="bf16")
        self.shards = self.engine.shard_map()
        generator = torch.Generator(self.device)
        with torch.no_grad():
            for one in self.shards:  # the same on ranks that hold the same
                digest = hashlib.blake2b(f"{one.name} {one.box}".encode(), digest_size=7).digest()
                one.view.normal_(0, 0.02, generator=generator.manual_seed(int.from_bytes(digest, "big")))
        connect(self.device)
        self.wait()
        self.server = WeightServer(
            lambda: self.shards, self.shape, self.dtype, self.device, self.setup.bucket_mib, timeout_s=120.0
        )
        return {one.name: one.shape for one in self.shards}

    def plan(self, wanted: Sequence[list[Wanted] | None]) -> tuple[Took, Any]:
        """Plan for the receiver beside each rank; this one's ticket."""
        dist.barrier()
        began = time.monotonic()
        spec = ReceiverSpec(f"receiver {self.rank}", wanted[self.rank], True)
        (ticket,) = self.server.plan([spec])
        ended = time.monotonic()
        self._plan_serial()
        return Took(began, ended), ticket

    def sync(self) -> Took:
        """Hand the weights out, in buckets."""
        began = time.monotonic()
        served = self.server.serve()
        assert not served.lost, served.lost
        return Took(began, time.monotonic(), served.bytes)

    def _plan_serial(self) -> None:
        whole: dict[str, Entry] = {}
        held = gather_holdings(self.shards, [])
        shapes: list[Any] = [None] * self.setup.ranks
        dist.all_gather_object(shapes, {s.name: (s.shape, s.trained) for s in self.shards})
        for rank in shapes:
            for name, (full, trained) in rank.items():
                dtype = self.dtype if trained else torch.float32
                whole[name] = Entry(name, full, whole_box(full), dtype)
        self._tensors: list[Bucket] = [laid_out([one]) for one in whole.values()]
        owners, types = (
            Owners([one.sources for one in held]),
            {name: one.dtype for name, one in whole.items()},
        )
        self._serial = Export(
            self.shards,
            held,
            owners,
            [made(one) for one in self._tensors],
            types.__getitem__,
            staging_bytes=1 << 40,  # nothing is cut
            device=self.device,
        )

    def serial(self) -> Took:
        """Tensor after tensor: gather it, hand it over, wait until it is loaded."""
        began = time.monotonic()
        for number, bucket in enumerate(self._tensors):
            nbytes = -(-bucket.nbytes // ALIGNMENT) * ALIGNMENT
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self._serial.fill(number, memory)
            self.wait()
            (entry,) = bucket.entries
            self.line.send((entry.name, bucket.views(memory)[0]))
            self.line.recv()
        self.line.send(None)
        self.line.recv()
        return Took(began, time.monotonic(), sum(one.nbytes for one in self._tensors))

    def copy_rate(self, nbytes: int) -> float:
        """Bytes a second that the device copies from one place of its memory to another."""
        source, target = (torch.empty(nbytes, dtype=torch.uint8, device=self.device).fill_(1) for _ in "ab")
        target.copy_(source)
        rates = []
        for _ in range(5):
            self.wait()
            began = time.perf_counter()
            for _ in range(4):
                target.copy_(source)
            self.wait()
            rates.append(4 * nbytes / (time.perf_counter() - began))
        return max(rates)


class Receiver(_Side):
    """A model in the rollout's layout, which takes the weights."""

    def build(self) -> list[Wanted] | None:
        """What it wants."""
        layout = schema.Layout(**self.setup.rollout)
        mesh = build.mesh_of(layout, self.setup.ranks)
        (model,) = build.build_chunks(self.shape, layout, mesh, self.dtype, schema.Engine())
        self.weights = Weights(model, mesh, brought=True)
        self.shards = self.weights.shards()
        for one in self.shards:
            one.view.detach().fill_(float("nan"))
        self._by_name: dict[str, list[Shard]] = {}
        for one in self.shards:
            self._by_name.setdefault(one.name, []).append(one)
        self._parts: dict[Any, torch.Tensor] = {}
        self.wait()
        return None if self.setup.whole else self.weights.wanted()

    def sync(self, source: ChannelSource) -> Took:
        """Take all pieces into the model, as the native rollout does."""
        began = time.monotonic()
        self.weights.take(source)
        self.wait()
        return Took(began, time.monotonic())

    def serial(self) -> Took:
        """The same, a full tensor at a time."""
        began = time.monotonic()
        while (said := self.line.recv()) is not None:
            name, tensor = said
            piece = Piece(name, tuple(tensor.shape), whole_box(tensor.shape), tensor)
            copy_all(self._places(piece))
            self.wait()
            del said, tensor, piece
            self.line.send(None)
        self.line.send(None)
        return Took(began, time.monotonic())

    def _places(self, piece: Piece) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where a piece's parts go in the model, and the parts."""
        found = []
        for number, shard in enumerate(self._by_name.get(piece.name, ())):
            box = meet(shard.box, piece.box)
            if box is None:
                continue
            key = piece.name, number, box
            if key not in self._parts:
                self._parts[key] = shard.part(box).detach()
            part = piece.tensor
            if box != piece.box:
                for dim, ((start, stop), (first, _)) in enumerate(zip(box, piece.box, strict=True)):
                    part = part.narrow(dim, start - first, stop - start)
            found.append((self._parts[key], part))
        return found


def serve(kind: str, rank: int, setup: Setup, port: int, pipe: Connection, line: Connection) -> None:
    """A process's life: do what the parent says until it says None."""
    sides: dict[str, Callable[..., _Side]] = {"trainer": Trainer, "receiver": Receiver}
    torch.set_num_threads(1 if setup.device == "cpu" else 8)
    side = sides[kind](rank, setup, port, line)
    while (said := pipe.recv()) is not None:
        method, *arguments = said
        pipe.send(getattr(side, method)(*arguments))
    dist.destroy_process_group()
