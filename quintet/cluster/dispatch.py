"""Dispatch protocols: who gets which arguments, and whose results count. Pure functions of the ranks' coordinates.

In the protocols that split, each *positional* argument is a list with one item for each part, prepared by the
caller (a plan made from lengths alone), and *keyword* arguments go to every rank as they are.

| protocol            | part                   | the same part goes to     | collected from         | results in order of |
|---------------------|------------------------|---------------------------|------------------------|---------------------|
| one_to_all          | everything             | every rank                | every rank             | rank                |
| rank_zero           | everything             | rank 0 only               | rank 0                 | (the one value)     |
| some(ranks)         | everything             | these ranks               | these ranks            | as they are given   |
| all_to_all          | one a rank             | -                         | every rank             | rank                |
| dp_compute          | one a rank, all are dp | -                         | every rank             | dp rank             |
| megatron_compute    | one a dp rank          | its tp, pp and cp ranks   | tp 0, last pp          | dp rank, then cp    |
| megatron_pp_as_dp   | one a (dp, pp) rank    | its tp and cp ranks       | tp 0, cp 0             | dp rank, then pp    |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Coords = Sequence[Mapping[str, int]]
"""By rank: its position on each mesh axis (`tp`, `pp`, `cp`, `dp`; an axis left out is position 0)."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True)
class Dispatch:
    """`split` gives each rank its arguments (None: the rank is not called); `owners` are the ranks whose results
    count, in the order of the results; `single` unwraps a list of one."""

    name: str
    split: Callable[[Coords, tuple[Any, ...], dict[str, Any]], list[Call | None]]
    owners: Callable[[Coords], list[int]]
    needs_coords: bool = False
    single: bool = False

    def collect(self, coords: Coords, results: Mapping[int, Any]) -> Any:
        """The caller's value, from results by rank."""
        values = [results[rank] for rank in self.owners(coords)]
        return values[0] if self.single else values


def _to_all(coords: Coords, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    return [(args, kwargs)] * len(coords)


def _to_rank_zero(coords: Coords, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    return [(args, kwargs), *[None] * (len(coords) - 1)]


def _all_ranks(coords: Coords) -> list[int]:
    return list(range(len(coords)))


def _by_part(
    name: str, parts: Sequence[int], n_parts: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Call | None]:
    """Rank r gets item `parts[r]` of every positional argument."""
    for position, arg in enumerate(args):
        if not isinstance(arg, (list, tuple)) or len(arg) != n_parts:
            found = f"{len(arg)} items" if isinstance(arg, (list, tuple)) else type(arg).__name__
            raise ValueError(
                f"{name}: positional argument {position} must be a list of {n_parts} items, one a part; "
                f"got {found}. What every rank needs goes by keyword."
            )
    return [(tuple(arg[part] for arg in args), kwargs) for part in parts]


def _split_all(coords: Coords, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    return _by_part("all_to_all", range(len(coords)), len(coords), args, kwargs)


def _dp_only(coords: Coords) -> list[int]:
    owners = sorted(range(len(coords)), key=lambda rank: coords[rank].get("dp", 0))
    if [coords[rank].get("dp", 0) for rank in owners] != list(range(len(coords))):
        raise ValueError("dp_compute: the layout has model-parallel ranks; use megatron_compute")
    return owners


def _split_dp(coords: Coords, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    _dp_only(coords)
    return _by_part("dp_compute", [c.get("dp", 0) for c in coords], len(coords), args, kwargs)


def _size(coords: Coords, axis: str) -> int:
    return 1 + max(c.get(axis, 0) for c in coords)


def _owners(
    name: str, coords: Coords, part: Callable[[Mapping[str, int]], int | None], n_parts: int
) -> list[int]:
    """The one rank that owns each part; `part` is None for a rank that owns none."""
    owners: dict[int, int] = {}
    for rank, c in enumerate(coords):
        index = part(c)
        if index is None:
            continue
        if index in owners:
            raise ValueError(f"{name}: ranks {owners[index]} and {rank} both own the output of part {index}")
        owners[index] = rank
    if sorted(owners) != list(range(n_parts)):
        raise ValueError(
            f"{name}: no rank owns the output of parts {sorted(set(range(n_parts)) - set(owners))}"
        )
    return [owners[index] for index in range(n_parts)]


def _split_megatron(coords: Coords, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    return _by_part("megatron_compute", [c.get("dp", 0) for c in coords], _size(coords, "dp"), args, kwargs)


def _owners_megatron(coords: Coords) -> list[int]:
    last, cp = _size(coords, "pp") - 1, _size(coords, "cp")

    def part(c: Mapping[str, int]) -> int | None:
        owns = c.get("tp", 0) == 0 and c.get("pp", 0) == last
        return c.get("dp", 0) * cp + c.get("cp", 0) if owns else None

    return _owners("megatron_compute", coords, part, _size(coords, "dp") * cp)


def _split_pp_as_dp(coords: Coords, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    pp = _size(coords, "pp")
    parts = [c.get("dp", 0) * pp + c.get("pp", 0) for c in coords]
    return _by_part("megatron_pp_as_dp", parts, _size(coords, "dp") * pp, args, kwargs)


def _owners_pp_as_dp(coords: Coords) -> list[int]:
    pp = _size(coords, "pp")

    def part(c: Mapping[str, int]) -> int | None:
        owns = c.get("tp", 0) == 0 and c.get("cp", 0) == 0
        return c.get("dp", 0) * pp + c.get("pp", 0) if owns else None

    return _owners("megatron_pp_as_dp", coords, part, _size(coords, "dp") * pp)


one_to_all = Dispatch("one_to_all", _to_all, _all_ranks)
rank_zero = Dispatch("rank_zero", _to_rank_zero, lambda coords: [0], single=True)
all_to_all = Dispatch("all_to_all", _split_all, _all_ranks)
dp_compute = Dispatch("dp_compute", _split_dp, _dp_only, needs_coords=True)
megatron_compute = Dispatch("megatron_compute", _split_megatron, _owners_megatron, needs_coords=True)
megatron_pp_as_dp = Dispatch("megatron_pp_as_dp", _split_pp_as_dp, _owners_pp_as_dp, needs_coords=True)


def some(ranks: Sequence[int]) -> Dispatch:
    """Of these ranks alone: for methods without collectives."""

    def split(coords: Coords, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
        return [(args, kwargs) if rank in ranks else None for rank in range(len(coords))]

    return Dispatch("some", split, lambda coords: list(ranks))
