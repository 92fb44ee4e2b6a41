"""Move weights from one layout to another, straight from shard to shard.

Both sides describe what they hold as boxes of full tensors (`quintet.engine.weights.shards`). Where a source box and a
destination box meet, that part travels from one owner of the source box to the destination. Everything is
planned once, from the boxes of all ranks. What stays on its rank is copied in place; what crosses ranks goes in rounds, an
all-to-all each, so that memory for what is on its way is bounded.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.agree import gathered
from quintet.engine.device import copy_all
from quintet.engine.weights.shards import Shard
from quintet.models.mcore import Box, box_sizes, meet, split, volume
from quintet.typed import Typed


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python's collector from looking at ten thousands of parts again and again while there come to be more: half of a plan's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


Holding = tuple[str, Box]
"""Name and box of a shard, without its data."""
STAGED_ALIGNMENT = 16
"""Bytes: parts of any type begin where vectors of them may."""


@dataclass(frozen=True)
class Transfer:
    """One part on its way: `box` of `name` from rank `source` (its shard `source_index`) to rank `target`."""

    name: str
    box: Box
    source: int
    source_index: int
    target: int
    target_index: int


def plan_transfers(
    sources: Sequence[Sequence[Holding]], targets: Sequence[Sequence[Holding]]
) -> list[Transfer]:
    """Return transfers that fill every target box, ordered by target index so that buckets follow the model.

    A part comes from its own rank where that rank holds it; otherwise the owners of a box share the work.

    Raises ValueError naming a box that no source covers.
    """
    owners: dict[str, dict[Box, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, holdings in enumerate(sources):
        for index, (name, box) in enumerate(holdings):
            owners[name][box].append((rank, index))
    transfers = []
    for target, holdings in enumerate(targets):
        for target_index, (name, box) in enumerate(holdings):
            missing = volume(box)
            for source_box, holders in owners[name].items():
                part = meet(box, source_box)
                if part is None:
                    continue
                local = [h for h in holders if h[0] == target]
                source, source_index = local[0] if local else holders[target % len(holders)]
                transfers.append(Transfer(name, part, source, source_index, target, target_index))
                missing -= volume(part)
            if missing:
                raise ValueError(f"{name}: {missing} elements of {box} on rank {target} have no source")
    return sorted(transfers, key=lambda t: (t.target_index, t.target, t.source, t.box))


@dataclass(frozen=True)
class Holdings:
    """What one rank brings to a plan and takes from it. buffers: names among them that are no parameters. units: of those
    whose rows lie in groups (q, k and v; gate and up), the size of a group along each dim: parts are whole ones, or within one."""

    sources: list[Holding]
    targets: list[Holding]
    buffers: set[str]
    units: dict[str, tuple[int, ...]] = field(default_factory=dict)


_HOLDINGS: Typed[Holdings] = Typed(Holdings, "what a rank holds of tensors")


def gather_holdings(sources: Sequence[Shard], targets: Sequence[Shard]) -> list[Holdings]:
    """Return every rank's holdings, in rank order. Collective."""
    both = [*sources, *targets]
    mine = Holdings(
        [(one.name, one.box) for one in sources],
        [(one.name, one.box) for one in targets],
        {one.name for one in both if not one.trained},
        units_of(both),
    )
    return gathered(_HOLDINGS, mine)


def units_of(shards: Iterable[Shard]) -> dict[str, tuple[int, ...]]:
    """Return the `Holdings.units` of shards."""
    found: dict[str, tuple[int, ...]] = {}
    for one in shards:
        units = tuple(one.unit(dim) for dim in range(len(one.box)))
        if any(unit > 1 for unit in units):
            found[one.name] = _common(units, found.get(one.name, units))
    return found


def all_units(held: Iterable[Holdings]) -> dict[str, tuple[int, ...]]:
    """Return where every rank's shards of a tensor can be cut, by name; a tensor that is not named, anywhere."""
    found: dict[str, tuple[int, ...]] = {}
    for one in held:
        for name, units in one.units.items():
            found[name] = _common(units, found.get(name, units))
    return found


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.lcm(x, y) for x, y in zip(a, b, strict=True))


def in_rounds(
    transfers: Iterable[Transfer],
    types: Callable[[str], torch.dtype],
    units: dict[str, tuple[int, ...]],
    limit: int,
) -> list[list[Transfer]]:
    """Return the transfers, cut where they must be, in rounds in which a rank sends at most `limit` bytes and gets as many.

    The first round has all that stays on its rank. The same on every rank: it follows from the plan alone.
    """
    rounds: list[list[Transfer]] = []
    at: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))  # round and bytes in it so far
    for whole in transfers:
        if whole.source == whole.target:
            _put(rounds, 0, whole)
            continue
        size = types(whole.name).itemsize
        for box in split(whole.box, units.get(whole.name, (1,) * len(whole.box)), limit // size):
            count = volume(box) * size
            ends = ("source", whole.source), ("target", whole.target)
            number = max(at[end][0] for end in ends)
            if any(at[end][0] == number and 0 < at[end][1] > limit - count for end in ends):
                number += 1
            for end in ends:
                at[end] = number, count + (at[end][1] if at[end][0] == number else 0)
            _put(rounds, number, whole if box == whole.box else replace(whole, box=box))
    return rounds


def _put(rounds: list[list[Transfer]], number: int, transfer: Transfer) -> None:
    rounds.extend([] for _ in range(number + 1 - len(rounds)))
    rounds[number].append(transfer)


class Round:
    """Transfers that are made together, seen from one rank. types: what each name travels as."""

    def __init__(
        self, transfers: Iterable[Transfer], types: Callable[[str], torch.dtype], rank: int, world: int
    ) -> None:
        self.own: list[Transfer] = []
        self.crosses = False
        sending: list[list[Transfer]] = [[] for _ in range(world)]
        receiving: list[list[Transfer]] = [[] for _ in range(world)]
        for t in transfers:
            if t.source == t.target:
                if t.source == rank:
                    self.own.append(t)
                continue
            self.crosses = True
            if t.source == rank:
                sending[t.target].append(t)
            elif t.target == rank:
                receiving[t.source].append(t)
        self.sending, self.sizes_out = _staged(sending, types)
        self.receiving, self.sizes_in = _staged(receiving, types)

    def run(
        self,
        read: Callable[[Transfer], Tensor],
        write: Callable[[Transfer], Tensor],
        device: torch.device,
    ) -> None:
        """Make the round's transfers. Collective where any rank's part crosses. read, write: views of a transfer's part on either
        side."""
        copy_all((write(t), read(t)) for t in self.own)
        if not self.crosses:
            return
        out = torch.empty(sum(self.sizes_out), dtype=torch.uint8, device=device)
        arrived = torch.empty(sum(self.sizes_in), dtype=torch.uint8, device=device)
        copy_all((one.of(out), read(one.transfer)) for one in self.sending)
        dist.all_to_all_single(arrived, out, self.sizes_in, self.sizes_out)
        copy_all((write(one.transfer), one.of(arrived)) for one in self.receiving)


@dataclass(frozen=True)
class _Staged:
    """A transfer's place among the bytes that leave or arrive."""

    transfer: Transfer
    dtype: torch.dtype
    start: int
    stop: int

    def of(self, staging: Tensor) -> Tensor:
        shape = box_sizes(self.transfer.box)
        return staging[self.start : self.stop].view(self.dtype).view(shape)


def _staged(
    by_rank: Sequence[Sequence[Transfer]], types: Callable[[str], torch.dtype]
) -> tuple[list[_Staged], list[int]]:
    """The places of all transfers, and how many bytes are each rank's."""
    found, sizes, at = [], [], 0
    for transfers in by_rank:
        start = at
        for t in transfers:
            dtype = types(t.name)
            nbytes = volume(t.box) * dtype.itemsize
            found.append(_Staged(t, dtype, at, at + nbytes))
            at += -(-nbytes // STAGED_ALIGNMENT) * STAGED_ALIGNMENT
        sizes.append(at - start)
    return found, sizes


class Parts:
    """Views of parts of one rank's shards, each looked for once."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self._views: dict[tuple[int, Box], Tensor] = {}

    def __call__(self, index: int, box: Box) -> Tensor:
        found = self._views.get((index, box))
        if found is None:
            shard = self.shards[index]
            found = shard.part(box)
            if shard.standing:
                self._views[index, box] = found
        return found


class Resharder:
    """A standing plan between two sets of shards over the same ranks. Weights travel as `dtype`, buffers in fp32.

    Collective to build and to run: every rank of the default group takes part, also one without shards. bucket_mib: of what
    a rank sends, and of what it gets, at a time. holdings: what every rank holds, where that is known already; building is
    then no collective.
    """

    def __init__(
        self,
        sources: list[Shard],
        targets: list[Shard],
        *,
        dtype: torch.dtype,
        device: torch.device,
        bucket_mib: int = 256,
        holdings: Sequence[Holdings] | None = None,
    ) -> None:
        self._device = device
        self._sources, self._targets = Parts(sources), Parts(targets)
        held = gather_holdings(sources, targets) if holdings is None else holdings
        buffers = set[str]().union(*(one.buffers for one in held))

        def types(name: str) -> torch.dtype:
            return torch.float32 if name in buffers else dtype

        transfers = plan_transfers([one.sources for one in held], [one.targets for one in held])
        rounds = in_rounds(transfers, types, all_units(held), bucket_mib << 20)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.rounds = [Round(one, types, rank, world) for one in rounds]

    def run(self) -> None:
        """Copy every target's content from the sources."""
        for one in self.rounds:
            one.run(self._read, self._write, self._device)

    def _read(self, t: Transfer) -> Tensor:
        return self._sources(t.source_index, t.box)

    def _write(self, t: Transfer) -> Tensor:
        return self._targets(t.target_index, t.box)
