"""Covering arrays cover, whatever the axes and constraints; the suite's own tables agree with the recipe's rules."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.covering import Constraint, Table, together

VALUES = st.integers(1, 4)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Up to five axes, with some random pairs and triples of values forbidden."""
    axes = {f"a{i}": tuple(range(draw(VALUES))) for i in range(draw(st.integers(2, 5)))}
    constraints = []
    for _ in range(draw(st.integers(0, 4))):
        names = tuple(draw(st.permutations(sorted(axes)))[: draw(st.integers(2, 3))])
        forbidden = tuple(draw(st.sampled_from(axes[name])) for name in names)
        constraints.append(Constraint(names, lambda *values, forbidden=forbidden: values != forbidden))
    return Table(axes, constraints)


def all_rows(table: Table) -> list[dict[str, int]]:
    rows = [dict(zip(table.axes, values, strict=True)) for values in product(*table.axes.values())]
    return [row for row in rows if table.allows(row)]


@settings(deadline=None, max_examples=80)
@given(tables(), st.integers(1, 2))
def test_every_allowed_pair_stands_in_a_row(table: Table, strength: int) -> None:
    rows, possible = table.covering(strength), all_rows(table)
    assert all(row in possible for row in rows)
    assert len(rows) <= len(possible)
    covered = {pair for row in rows for pair in together(row, strength)}
    assert covered == {pair for row in possible for pair in together(row, strength)}


def test_rows_are_few_and_the_same_each_time() -> None:
    axes = {f"a{i}": (0, 1, 2) for i in range(8)}
    rows = Table(axes, []).covering()
    assert len(rows) <= 20  # of 6561; 9 is the least there can be for two axes alone
    assert rows == Table(axes, []).covering()


@pytest.mark.parametrize("row", [{"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 0}])
def test_rows_that_cannot_be_completed(row: dict[str, int]) -> None:
    table = Table({"a": (0, 1), "b": (0, 1), "c": (0, 1)}, [Constraint(("a", "b"), lambda a, b: a != b)])
    assert table.complete(row) is None
    assert table.complete({"a": 1}) == {"a": 1, "b": 0, "c": 0}
