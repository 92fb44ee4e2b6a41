"""Covering arrays: few rows in which every allowed pair of values of two axes stands side by side.

Most faults of a combination are faults of two of its values. A table with all pairs finds them with a handful of
rows where all combinations would be thousands (Cohen et al. 1997, https://doi.org/10.1109/32.605761).

Axes have constraints, so "every allowed pair" means every pair that stands in at least one allowed row; whether one
does is decided by search. The same input gives the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

PackedRow = dict[str, Any]
Together = frozenset[tuple[str, Any]]
"""Values of a few axes that stand in one row."""

SEEDS = 16
"""Rows tried for each row taken."""


@dataclass(frozen=True)
class Constraint:
    """What must hold between some axes. `holds` takes their values in the order of `axes`."""

    axes: tuple[str, ...]
    holds: Callable[..., bool]


_Way = list[tuple[str, list[Constraint]]]


class Table:
    """Axes under constraints.

    axes: values by name, the cheapest first: that one is taken where nothing asks for another. A constraint counts
    where the table has all of its axes, so one list of constraints serves several tables.
    """

    def __init__(self, axes: Mapping[str, Sequence[Any]], constraints: Iterable[Constraint]) -> None:
        self.axes = {name: tuple(values) for name, values in axes.items()}
        counted = [c for c in constraints if set(c.axes) <= set(axes)]
        self._of_axis = {name: [c for c in counted if name in c.axes] for name in axes}
        self._ways: dict[frozenset[str], _Way] = {}

    def allows(self, row: PackedRow) -> bool:
        """Whether no constraint is broken between the axes that the row has."""
        return all(
            c.holds(*(row[a] for a in c.axes))
            for name in row
            for c in self._of_axis[name]
            if all(a in row for a in c.axes)
        )

    def complete(
        self, row: PackedRow, worth: Callable[[PackedRow, str, Any], int] | None = None
    ) -> PackedRow | None:
        """An allowed row that extends this one, or None where there is none.

        worth: of a value of an axis beside the row so far; the highest is tried first.
        """
        if not self.allows(row):
            return None
        whole = dict(row)
        return (
            {name: whole[name] for name in self.axes} if self._extend(whole, self._way(row), worth) else None
        )

    def _way(self, row: PackedRow) -> _Way:
        """The axes that a row lacks, in the order in which they are tried, and what constrains each beside those before it."""
        names = frozenset(row)
        if names not in self._ways:
            seen, way = set(names), []
            for name in self.axes:
                if name not in names:
                    seen.add(name)
                    way.append((name, [c for c in self._of_axis[name] if seen.issuperset(c.axes)]))
            self._ways[names] = way
        return self._ways[names]

    def _extend(
        self, row: PackedRow, way: _Way, worth: Callable[[PackedRow, str, Any], int] | None, at: int = 0
    ) -> bool:
        """Extend the row itself along the way; it is as it was where there is no such row."""
        if at == len(way):
            return True
        name, constraints = way[at]
        values = self.axes[name]
        if worth is not None and len(values) > 1:
            values = tuple(sorted(values, key=lambda v: -worth(row, name, v)))
        for value in values:
            row[name] = value
            for c in constraints:
                if not c.holds(*[row[a] for a in c.axes]):
                    break
            else:
                if self._extend(row, way, worth, at + 1):
                    return True
        del row[name]
        return False

    def allowed(self, strength: int = 2) -> Iterator[Together]:
        """Every choice of values of `strength` axes that stands in some allowed row."""
        for names in combinations(self.axes, strength):
            for values in product(*(self.axes[name] for name in names)):
                row = dict(zip(names, values, strict=True))
                if self.complete(row) is not None:
                    yield frozenset(row.items())

    def covering(self, strength: int = 2) -> list[PackedRow]:
        """Rows in which every allowed choice of values of `strength` axes stands, greedily few of them."""
        missing = dict.fromkeys(self.allowed(strength))

        def worth(row: PackedRow, name: str, value: Any) -> int:
            others = combinations(row.items(), strength - 1)
            return sum(frozenset(((name, value), *other)) in missing for other in others)

        rows: list[PackedRow] = []
        while missing:
            seeds = list(missing)[:: max(1, len(missing) // SEEDS)]
            tried = [row for seed in seeds if (row := self.complete(dict(sorted(seed)), worth)) is not None]
            rows.append(max(tried, key=lambda row: sum(one in missing for one in together(row, strength))))
            for one in together(rows[-1], strength):
                missing.pop(one, None)
        return rows


def together(row: PackedRow, strength: int = 2) -> Iterator[Together]:
    """Every choice of `strength` of a row's values."""
    return map(frozenset, combinations(row.items(), strength))
