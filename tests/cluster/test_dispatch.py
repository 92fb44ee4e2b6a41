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


def test_one_to_all_and_rank_zero() -> None:
    coords = [{}] * 3
    assert dispatch.one_to_all.split(coords, (1,), {"k": 2}) == [((1,), {"k": 2})] * 3
    assert dispatch.one_to_all.collect(coords, {0: "a", 1: "b", 2: "c"}) == ["a", "b", "c"]
    assert dispatch.rank_zero.split(coords, (1,), {}) == [((1,), {}), None, None]
    assert dispatch.rank_zero.collect(coords, {0: "a"}) == "a"


def test_some_ranks_answer_in_the_order_they_are_named() -> None:
    coords: list[dict[str, int]] = [{}] * 4
    some = dispatch.some([3, 1])
    assert some.split(coords, (1,), {"a": 2}) == [None, ((1,), {"a": 2}), None, ((1,), {"a": 2})]
    assert some.collect(coords, {1: "b", 3: "d"}) == ["d", "b"]
    assert dispatch.some([]).collect(coords, {}) == []


def test_all_to_all_gives_each_rank_its_own() -> None:
    coords = [{}] * 2
    assert dispatch.all_to_all.split(coords, (["a", "b"], [1, 2]), {"k": 0}) == [
        (("a", 1), {"k": 0}),
        (("b", 2), {"k": 0}),
    ]


@given(meshes)
def test_megatron_compute_splits_over_dp_and_collects_from_the_last_stage(
    coords: list[dict[str, int]],
) -> None:
    """Every cp rank answers: each counts the cells that it is the first rank of."""
    dp, pp, cp = (1 + max(c[axis] for c in coords) for axis in ("dp", "pp", "cp"))
    parts = [f"part {d}" for d in range(dp)]
    calls = dispatch.megatron_compute.split(coords, (parts,), {})
    assert [call[0][0] for call in calls if call] == [f"part {c['dp']}" for c in coords]
    owners = dispatch.megatron_compute.owners(coords)
    assert [(coords[r]["dp"], coords[r]["pp"], coords[r]["tp"], coords[r]["cp"]) for r in owners] == [
        (d, pp - 1, 0, c) for d in range(dp) for c in range(cp)
    ]
    results = {rank: call[0][0] for rank, call in enumerate(calls) if call}
    assert dispatch.megatron_compute.collect(coords, results) == [part for part in parts for _ in range(cp)]


@given(meshes)
def test_megatron_pp_as_dp_uses_every_pipeline_rank(coords: list[dict[str, int]]) -> None:
    dp, pp = (1 + max(c[axis] for c in coords) for axis in ("dp", "pp"))
    parts = list(range(dp * pp))
    calls = dispatch.megatron_pp_as_dp.split(coords, (parts,), {})
    results = {rank: call[0][0] for rank, call in enumerate(calls) if call}
    assert dispatch.megatron_pp_as_dp.collect(coords, results) == parts
    for rank, c in enumerate(coords):
        assert results[rank] == c["dp"] * pp + c["pp"]


def test_dp_compute_wants_a_layout_of_dp_alone() -> None:
    shuffled = [{"dp": 2}, {"dp": 0}, {"dp": 1}]
    calls = dispatch.dp_compute.split(shuffled, (["a", "b", "c"],), {})
    assert [call[0][0] for call in calls if call] == ["c", "a", "b"]
    assert dispatch.dp_compute.collect(shuffled, {0: "c", 1: "a", 2: "b"}) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="use megatron_compute"):
        dispatch.dp_compute.split(mesh(tp=2, dp=2), (["a", "b", "c", "d"],), {})


@pytest.mark.parametrize("wrong", [["only one"], "ab", {"a": 1, "b": 2}])
def test_a_part_too_few_is_an_error(wrong: object) -> None:
    with pytest.raises(ValueError, match="megatron_compute: positional argument 0 must be a list of 2 items"):
        dispatch.megatron_compute.split(mesh(tp=2, dp=2), (wrong,), {})


def test_two_owners_of_a_part_are_an_error() -> None:
    with pytest.raises(ValueError, match="ranks 0 and 1 both own the output of part 0"):
        dispatch.megatron_compute.owners([{"dp": 0}, {"dp": 0}])
