"""Move weights from one layout to another, straight from shard to shard.

Both sides describe what they hold as boxes of full tensors (`quintet.engine.weights.shards`). Where a source box and a
destination box meet, that part travels from one owner of the source box to the destination. A rank plans once, and only what it
gets; what it is to send it is asked for by those who get it. So its work does not grow with the number of ranks. What stays on
its rank is copied in place; what crosses ranks goes in rounds, an all-to-all each, so that memory for what is on its way is
bounded.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.agree import exchanged, gathered, most, run_on_all_or_raise
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


class Owners:
    """Who holds which boxes of which tensors. sources: every rank's holdings."""

    def __init__(self, sources: Sequence[Sequence[Holding]]) -> None:
        ranks: dict[int, list[int]] = defaultdict(list)  # those that hold the same are one object: `gathered`
        for rank, holdings in enumerate(sources):
            ranks[id(holdings)].append(rank)
        self._alike = list(ranks.values())
        self._boxes: dict[str, dict[Box, dict[int, int]]] = {}
        for alike, (first, *_) in enumerate(self._alike):
            for index, (name, box) in enumerate(sources[first]):
                self._boxes.setdefault(name, {}).setdefault(box, {})[alike] = index
        self._in_order = lru_cache(maxsize=None)(self._sorted)

    def names(self) -> Iterable[str]:
        """Return the tensors of which somebody holds a part."""
        return self._boxes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor, all of which is held. Raises KeyError for one that nobody holds."""
        ends = [[stop for _, stop in box] for box in self._boxes[name]]
        return tuple(map(max, *ends) if len(ends) > 1 else ends[0])

    def sources(self, name: str, box: Box, target: int) -> Iterator[tuple[Box, int, int]]:
        """Yield the parts of a box that are held: each with the rank that sends it to the target, and its index there. That is the
        target itself where it holds the part; otherwise the owners share the work."""
        for held, indices in self._boxes.get(name, {}).items():
            part = meet(box, held)
            if part is not None:
                order, place = self._in_order(tuple(indices))
                rank = target if target in place else order[target % len(order)]
                yield part, rank, indices[place[rank]]

    def _sorted(self, sets: tuple[int, ...]) -> tuple[list[int], dict[int, int]]:
        """The ranks of some of the sets that hold the same, and of which set each is."""
        place = {rank: alike for alike in sets for rank in self._alike[alike]}
        return sorted(place), place


def plan_transfers(owners: Owners, target: int, wanted: Iterable[Holding]) -> list[Transfer]:
    """Return transfers that fill every box that a rank wants, in its order.

    Raises ValueError naming a box that no source covers.
    """
    transfers = []
    for target_index, (name, box) in enumerate(wanted):
        missing = volume(box)
        for part, source, source_index in owners.sources(name, box, target):
            transfers.append(Transfer(name, part, source, source_index, target, target_index))
            missing -= volume(part)
        if missing:
            raise ValueError(f"{name}: {missing} elements of {box} on rank {target} have no source")
    return transfers


@dataclass(frozen=True)
class Holdings:
    """What one rank brings to a plan. buffers: names of tensors, among those too that it takes, that are no parameters. units: of
    those whose rows lie in groups (q, k and v; gate and up), the size of a group along each dim: parts are whole ones, or within
    one."""

    sources: list[Holding]
    buffers: set[str]
    units: dict[str, tuple[int, ...]] = field(default_factory=dict)


_HOLDINGS: Typed[Holdings] = Typed(Holdings, "what a rank holds of tensors")


def gather_holdings(sources: Sequence[Shard], targets: Sequence[Shard]) -> list[Holdings]:
    """Return every rank's holdings, in rank order. Collective."""
    both = [*sources, *targets]
    mine = Holdings(
        [(one.name, one.box) for one in sources],
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
    for one in {id(one): one for one in held}.values():
        for name, units in one.units.items():
            found[name] = _common(units, found.get(name, units))
    return found


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.lcm(x, y) for x, y in zip(a, b, strict=True))


Asked = tuple[int, int, Box, int, int, int]
"""A part that a rank asks another for: turn, source index, box, target index; and at which byte it begins of those that cross to
the target in that turn, and how many these are."""
_ASKED: Typed[list[Asked]] = Typed(list[Asked], "what a rank is to send")
FINEST = 8
"""So often parts are halved, and rounds made more by a quarter, where a round has too much."""


class Turns:
    """The transfers of several turns that one rank takes part in, in rounds in which none sends more than `limit` bytes, or gets more.

    getting: what the rank gets in each turn, from itself too. types: what each name travels as. Parts are halved up to FINEST
    times to fit; one that cannot be cut may be larger.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        getting: Sequence[Iterable[Transfer]],
        types: Callable[[str], torch.dtype],
        units: dict[str, tuple[int, ...]],
        limit: int,
    ) -> None:
        self._rank, self._world, self._types, self._units, self._limit = rank, world, types, units, limit
        self._own: list[list[Transfer]] = []
        self._in: list[list[_Crossing]] = []
        self._out: list[list[_Crossing]] = []
        for one in getting:
            transfers = list(one)
            self._own.append([t for t in transfers if t.source == rank])
            self._in.append(self._spread([t for t in transfers if t.source != rank]))

    def __len__(self) -> int:
        return len(self._own)

    def _spread(self, crossing: Sequence[Transfer]) -> list[_Crossing]:
        """What one turn brings, in an order that has something of every source all the time: each begins elsewhere with its parts,
        so that no source has everybody's at once."""
        sizes = [volume(t.box) * self._types(t.name).itemsize for t in crossing]
        totals: dict[int, int] = defaultdict(int)
        for t, size in zip(crossing, sizes, strict=True):
            totals[t.source] += size
        begun: dict[int, int] = defaultdict(int)
        keyed = []
        for i, (t, size) in enumerate(zip(crossing, sizes, strict=True)):
            at = begun[t.source] / totals[t.source] + (self._rank - t.source) % self._world / self._world
            begun[t.source] += size
            keyed.append((at % 1, i))
        found, first, total = [], 0, sum(sizes)
        for _, i in sorted(keyed):
            found.append((crossing[i], first, total))
            first += sizes[i]
        return found

    def ask(self) -> list[list[Asked]]:
        """Return what every rank is to send to this one."""
        asked: list[list[Asked]] = [[] for _ in range(self._world)]
        for turn, crossing in enumerate(self._in):
            for t, first, total in crossing:
                asked[t.source].append((turn, t.source_index, t.box, t.target_index, first, total))
        return asked

    def answer(self, asked: Iterable[Iterable[Asked]], count: int, sources: Sequence[Holding]) -> None:
        """Note what every rank asks of this one. count: of turns, of the rank with most. sources: what this one holds."""
        for sides in (self._own, self._in):
            sides.extend([] for _ in range(count - len(sides)))
        self._out = [[] for _ in range(count)]
        for target, wishes in enumerate(asked):
            for turn, index, box, target_index, first, total in wishes:
                t = Transfer(sources[index][0], box, self._rank, index, target, target_index)
                self._out[turn].append((t, first, total))

    def busiest(self) -> list[int]:
        """Return how many bytes the rank sends in each turn, or gets, whichever is more."""
        found = []
        for crossing, out in zip(self._in, self._out, strict=True):
            sent = sum(volume(t.box) * self._types(t.name).itemsize for t, _, _ in out)
            found.append(max(sent, crossing[0][2] if crossing else 0))
        return found

    def count(self, busiest: int, tries: int) -> int:
        """Return of how many rounds a turn is, given the bytes of the rank with most."""
        return -(-busiest * (5 + tries) // (4 * self._limit)) if busiest > self._limit else min(busiest, 1)

    def exceeds(self, turn: int, busiest: int, tries: int) -> bool:
        """Return whether in one of a turn's rounds this rank sends or gets more than the limit."""
        rounds = self.count(busiest, tries)
        if rounds < 2 or tries == FINEST:
            return False
        for side in (self._in, self._out):
            loads = [0] * rounds
            for _, number, nbytes in self._pieces(side[turn], rounds, tries):
                loads[number] += nbytes
            if max(loads) > self._limit:
                return True
        return False

    def rounds(self, turn: int, busiest: int, tries: int) -> list[Round]:
        """Return the rounds of a turn. All that stays on the rank is in the first."""
        count = self.count(busiest, tries)
        sides: list[list[dict[int, list[Transfer]]]] = []
        for side, end in ((self._out, "target"), (self._in, "source")):
            parts: list[dict[int, list[Transfer]]] = [defaultdict(list) for _ in range(count)]
            for t, number, _ in self._pieces(side[turn], count, tries):
                parts[number][getattr(t, end)].append(t)
            sides.append(parts)
        own = self._own[turn]
        if not count:
            return [Round(own, {}, {}, self._types, self._world, crosses=False)] if own else []
        return [
            Round([] if number else own, sending, receiving, self._types, self._world)
            for number, (sending, receiving) in enumerate(zip(*sides, strict=True))
        ]

    def _pieces(
        self, crossing: Iterable[_Crossing], rounds: int, tries: int
    ) -> Iterator[tuple[Transfer, int, int]]:
        """Parts of transfers, each with its round and its bytes: the same at both ends."""
        limit = max(self._limit >> (tries + 1), 1)
        for whole, first, total in crossing:
            size = self._types(whole.name).itemsize
            nbytes = volume(whole.box) * size
            if rounds == 1 or nbytes <= limit:
                yield whole, first * rounds // total, nbytes
                continue
            for box in split(whole.box, self._units.get(whole.name, (1,) * len(whole.box)), limit // size):
                nbytes = volume(box) * size
                yield replace(whole, box=box), first * rounds // total, nbytes
                first += nbytes


_Crossing = tuple[Transfer, int, int]
"""A transfer, and where it begins among the bytes that its target gets from others in that turn, and how many these are."""


def agreed_rounds(turns: Turns, sources: Sequence[Holding]) -> list[list[Round]]:
    """Return the rounds of every turn, as many on every rank. Collective. sources: what this rank holds."""
    asked = exchanged(_ASKED, turns.ask())
    (count,) = most([len(turns)])
    turns.answer(asked, count, sources)
    busiest = most(turns.busiest())
    tries = [0] * count
    open_turns = list(range(count))
    while open_turns:
        exceeding = most([turns.exceeds(turn, busiest[turn], tries[turn]) for turn in open_turns])
        open_turns = [turn for turn, too_much in zip(open_turns, exceeding, strict=True) if too_much]
        for turn in open_turns:
            tries[turn] += 1
    return [turns.rounds(turn, busiest[turn], tries[turn]) for turn in range(count)]


class Round:
    """Transfers that are made together, seen from one rank. own: what stays there. sending: by target, receiving: by source. types: what
    each name travels as. crosses: whether any rank's part crosses, the same on all."""

    def __init__(
        self,
        own: list[Transfer],
        sending: Mapping[int, Sequence[Transfer]],
        receiving: Mapping[int, Sequence[Transfer]],
        types: Callable[[str], torch.dtype],
        world: int,
        *,
        crosses: bool = True,
    ) -> None:
        self.own, self.crosses = own, crosses
        self.sending, self.sizes_out = _staged(sending, types, world)
        self.receiving, self.sizes_in = _staged(receiving, types, world)

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
    by_rank: Mapping[int, Sequence[Transfer]], types: Callable[[str], torch.dtype], world: int
) -> tuple[list[_Staged], list[int]]:
    """The places of all transfers, and how many bytes are each rank's."""
    found, sizes, at = [], [0] * world, 0
    for rank in sorted(by_rank):
        start = at
        for t in by_rank[rank]:
            dtype = types(t.name)
            nbytes = volume(t.box) * dtype.itemsize
            found.append(_Staged(t, dtype, at, at + nbytes))
            at += -(-nbytes // STAGED_ALIGNMENT) * STAGED_ALIGNMENT
        sizes[rank] = at - start
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
    a rank sends, and of what it gets, at a time. held: what every rank holds, where that is known already.

    Raises ValueError where a target has no source; other ranks RuntimeError.
    """

    def __init__(
        self,
        sources: list[Shard],
        targets: list[Shard],
        *,
        dtype: torch.dtype,
        device: torch.device,
        bucket_mib: int = 256,
        held: Sequence[Holdings] | None = None,
    ) -> None:
        self._device = device
        self._sources, self._targets = Parts(sources), Parts(targets)
        held = gather_holdings(sources, targets) if held is None else held
        buffers = set[str]().union(*(one.buffers for one in held))
        rank, world = dist.get_rank(), dist.get_world_size()

        def types(name: str) -> torch.dtype:
            return torch.float32 if name in buffers else dtype

        def plan() -> Turns:
            wanted = [(one.name, one.box) for one in targets]
            getting = plan_transfers(Owners([one.sources for one in held]), rank, wanted)
            return Turns(rank, world, [getting], types, all_units(held), bucket_mib << 20)

        (self.rounds,) = agreed_rounds(run_on_all_or_raise(plan), held[rank].sources)

    def run(self) -> None:
        """Copy every target's content from the sources."""
        for one in self.rounds:
            one.run(self._read, self._write, self._device)

    def _read(self, t: Transfer) -> Tensor:
        return self._sources(t.source_index, t.box)

    def _write(self, t: Transfer) -> Tensor:
        return self._targets(t.target_index, t.box)
