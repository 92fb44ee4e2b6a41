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


class Table:
    """Axes under constraints.

    axes: values by name, the cheapest first: that one is taken where nothing asks for another. A constraint counts
    where the table has all of its axes, so one list of constraints serves several tables.
    """

    def __init__(self, axes: Mapping[str, Sequence[Any]], constraints: Iterable[Constraint]) -> None:
        self.axes = {name: tuple(values) for name, values in axes.items()}
        counted = [c for c in constraints if set(c.axes) <= set(axes)]
        self._of_axis = {name: [c for c in counted if name in c.axes] for name in axes}

    def allows(self, row: PackedRow, added: Iterable[str] | None = None) -> bool:
        """Whether no constraint is broken between the axes that the row has. added: those not looked at before."""
        return all(
            c.holds(*(row[a] for a in c.axes))
            for name in (row if added is None else added)
            for c in self._of_axis[name]
            if all(a in row for a in c.axes)
        )

    def complete(
        self, row: PackedRow, worth: Callable[[PackedRow, str, Any], int] = lambda *_: 0
    ) -> PackedRow | None:
        """An allowed row that extends this one, or None where there is none.

        worth: of a value of an axis beside the row so far; the highest is tried first.
        """
        return self._extend(row, worth) if self.allows(row) else None

    def _extend(self, row: PackedRow, worth: Callable[[PackedRow, str, Any], int]) -> PackedRow | None:
        name = next((name for name in self.axes if name not in row), None)
        if name is None:
            return {name: row[name] for name in self.axes}
        for value in sorted(self.axes[name], key=lambda v: -worth(row, name, v)):
            longer = {**row, name: value}
            found = self._extend(longer, worth) if self.allows(longer, [name]) else None
            if found is not None:
                return found
        return None

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
