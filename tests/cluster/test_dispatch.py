"""Dispatch protocols on made-up coordinates: every mesh gives each rank the right part, and one owner a part."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.cluster import dispatch


def mesh(tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1) -> list[dict[str, int]]:
    """Coordinates in megatron's order: tp innermost, pp outermost."""
    axes = product(range(pp), range(dp), range(cp), range(tp))
    return [{"tp": t, "cp": c, "dp": d, "pp": p} for p, d, c, t in axes]


sizes = st.integers(1, 3)
meshes = st.builds(mesh, sizes, sizes, sizes, sizes)


def test_all_to_all_gives_each_rank_its_own() -> None:
    coords: list[dict[str, int]] = [{}] * 2
    assert dispatch.all_to_all.split(coords, ["a", "b"]) == ["a", "b"]
    assert dispatch.all_to_all.owners(coords) == [0, 1]


@given(meshes)
def test_megatron_compute_splits_over_dp_and_collects_from_the_last_stage(
    coords: list[dict[str, int]],
) -> None:
    """Every cp rank answers: each counts the cells that it is the first rank of."""
    dp, pp, cp = (1 + max(c[axis] for c in coords) for axis in ("dp", "pp", "cp"))
    parts = [f"part {d}" for d in range(dp)]
    given = dispatch.megatron_compute.split(coords, parts)
    assert given == [f"part {c['dp']}" for c in coords]
    owners = dispatch.megatron_compute.owners(coords)
    assert [(coords[r]["dp"], coords[r]["pp"], coords[r]["tp"], coords[r]["cp"]) for r in owners] == [
        (d, pp - 1, 0, c) for d in range(dp) for c in range(cp)
    ]
    assert [given[rank] for rank in owners] == [part for part in parts for _ in range(cp)]


@given(meshes)
def test_megatron_pp_as_dp_uses_every_pipeline_rank(coords: list[dict[str, int]]) -> None:
    dp, pp = (1 + max(c[axis] for c in coords) for axis in ("dp", "pp"))
    parts = list(range(dp * pp))
    given = dispatch.megatron_pp_as_dp.split(coords, parts)
    assert given == [c["dp"] * pp + c["pp"] for c in coords]
    assert [given[rank] for rank in dispatch.megatron_pp_as_dp.owners(coords)] == parts


def test_dp_compute_wants_a_layout_of_dp_alone() -> None:
    shuffled = [{"dp": 2}, {"dp": 0}, {"dp": 1}]
    assert dispatch.dp_compute.split(shuffled, ["a", "b", "c"]) == ["c", "a", "b"]
    assert dispatch.dp_compute.owners(shuffled) == [1, 2, 0]
    with pytest.raises(ValueError, match="dp_compute: ranks 0 and 1 both own the output of part 0"):
        dispatch.dp_compute.owners(mesh(tp=2, dp=2))


@pytest.mark.parametrize("wrong", [["only one"], "ab", {"a": 1, "b": 2}])
def test_a_part_too_few_is_an_error(wrong: object) -> None:
    with pytest.raises(ValueError, match="megatron_compute: a list of 2 items is wanted"):
        dispatch.megatron_compute.split(mesh(tp=2, dp=2), wrong)


def test_two_owners_of_a_part_are_an_error() -> None:
    with pytest.raises(ValueError, match="ranks 0 and 1 both own the output of part 0"):
        dispatch.megatron_compute.owners([{"dp": 0}, {"dp": 0}])
