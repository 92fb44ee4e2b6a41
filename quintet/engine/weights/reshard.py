"""Move weights from one layout to another, straight from shard to shard.

Both sides describe what they hold as boxes of full tensors (`quintet.engine.weights.shards`). Where a source box and a
destination box meet, that part travels from one owner of the source box to the destination. A rank plans once, and only what it
gets; what it is to send it is asked for by those who get it (`quintet.engine.weights.rounds`). So its work does not grow with the
number of ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist

from quintet.engine.agree import gathered, run_on_all_or_raise
from quintet.engine.weights.rounds import Holding, Parts, Transfer, Turns, agreed_rounds
from quintet.engine.weights.shards import Shard
from quintet.models.mcore import Box, meet, volume
from quintet.typed import Typed


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
        self._bytes = sum(one.view.numel() * types(one.name).itemsize for one in targets)

    def run(self) -> int:
        """Copy every target's content from the sources; bytes that came to this rank's targets."""
        for one in self.rounds:
            one.run(self._sources, lambda t: self._targets(t.target_index, t.box), self._device)
        return self._bytes
