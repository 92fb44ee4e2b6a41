"""Dispatch protocols: who gets which part, and whose results count. Pure functions of the ranks' coordinates.

A verb that splits takes one list with an item for each part, prepared by the caller (a plan made from lengths alone); whatever
else it takes goes to every rank as it is (`quintet.cluster.group.WorkerGroup`).

| protocol            | part                   | the same part goes to     | collected from         | results in order of |
|---------------------|------------------------|---------------------------|------------------------|---------------------|
| all_to_all          | one a rank             | -                         | every rank             | rank                |
| dp_compute          | one a rank, all are dp | -                         | every rank             | dp rank             |
| megatron_compute    | one a dp rank          | its tp, pp and cp ranks   | tp 0, last pp          | dp rank, then cp    |
| megatron_pp_as_dp   | one a (dp, pp) rank    | its tp and cp ranks       | tp 0, cp 0             | dp rank, then pp    |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Coords = Sequence[Mapping[str, int]]
"""By rank: its position on each mesh axis (`tp`, `pp`, `cp`, `dp`; an axis left out is position 0)."""
T = TypeVar("T")


@dataclass(frozen=True)
class Dispatch:
    """A dispatch protocol: one part for each position on the axes `parts`, one result for each on `results`, in their order.

    tellers: where the ranks whose results count are on other axes; -1 is the last position.
    """

    name: str
    parts: tuple[str, ...]
    results: tuple[str, ...]
    tellers: Mapping[str, int] = field(default_factory=dict)

    def split(self, coords: Coords, parts: Sequence[T]) -> list[T]:
        """Return each rank's part. Raises ValueError where there are more or fewer than the layout has."""
        wanted, n_parts = _numbers(coords, self.parts)
        if not isinstance(parts, (list, tuple)) or len(parts) != n_parts:
            found = f"{len(parts)} items" if isinstance(parts, (list, tuple)) else type(parts).__name__
            raise ValueError(f"{self.name}: a list of {n_parts} items is wanted, one a part; got {found}")
        return [parts[number] for number in wanted]

    def owners(self, coords: Coords) -> list[int]:
        """Return the ranks whose results count, in the order of the results. Raises ValueError where not one tells of each."""
        numbers, n_results = _numbers(coords, self.results)
        owners: dict[int, int] = {}
        for rank, number in enumerate(numbers):
            if any(_at(coords, axis)[rank] != at % _size(coords, axis) for axis, at in self.tellers.items()):
                continue
            if number in owners:
                raise ValueError(
                    f"{self.name}: ranks {owners[number]} and {rank} both own the output of part {number}"
                )
            owners[number] = rank
        if missing := sorted(set(range(n_results)) - owners.keys()):
            raise ValueError(f"{self.name}: no rank owns the output of parts {missing}")
        return [owners[number] for number in range(n_results)]


def _at(coords: Coords, axis: str) -> list[int]:
    return [rank if axis == "rank" else c.get(axis, 0) for rank, c in enumerate(coords)]


def _size(coords: Coords, axis: str) -> int:
    return 1 + max(_at(coords, axis))


def _numbers(coords: Coords, axes: Sequence[str]) -> tuple[list[int], int]:
    """By rank the number of its position on these axes, the last one fastest; and how many there are."""
    numbers, count = [0] * len(coords), 1
    for axis in axes:
        size = _size(coords, axis)
        numbers = [number * size + at for number, at in zip(numbers, _at(coords, axis), strict=True)]
        count *= size
    return numbers, count


all_to_all = Dispatch("all_to_all", ("rank",), ("rank",))
dp_compute = Dispatch("dp_compute", ("dp",), ("dp",))
megatron_compute = Dispatch("megatron_compute", ("dp",), ("dp", "cp"), {"tp": 0, "pp": -1})
megatron_pp_as_dp = Dispatch("megatron_pp_as_dp", ("dp", "pp"), ("dp", "pp"), {"tp": 0, "cp": 0})
