"""Which rank saves what several hold, and in which pieces: what needs no ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quintet.engine.checkpoint import parts
from quintet.engine.mesh import Mesh, Sizes
from quintet.models.mcore import volume

SIZES = Sizes(tp=2, cp=2, dp=4, pp=2, ep=2, etp=4)


@pytest.mark.parametrize(
    ("split", "axes", "of_slices"),
    [
        ("rows", ("cp", "dp"), ()),
        ("replicated", ("tp", "cp", "dp"), ("tp",)),
        ("expert_rows", ("edp",), ()),
        ("expert_replicated", ("etp", "edp"), ("etp",)),
    ],
)
def test_those_that_hold_the_same_take_turns(split, axes, of_slices):
    block: Any = None

    def turns(ranks: list[int], copy: bool, sliced: bool) -> list[list[int]]:
        """Of as many tensors as there are ranks, those that save each."""
        tensors = [parts._Placed(torch.empty(0), block, order, split, copy) for order in range(len(ranks))]
        groups: Any = None
        return [
            [rank for rank in ranks if one.saved_by(Mesh(SIZES, rank, groups), sliced=sliced)]
            for one in tensors
        ]

    for sliced, held_by in ((False, axes), (True, of_slices)):
        for ranks in SIZES.partition(*held_by):
            assert sorted(turns(ranks, False, sliced)) == [[rank] for rank in sorted(ranks)]
            assert not any(turns(ranks, True, sliced))


@pytest.mark.parametrize(("most_bytes", "rows"), [(1, 1), (2 * 24, 2), (2 * 24 + 23, 2), (1 << 20, 7)])
def test_pieces_are_whole_rows_and_no_larger_than_one_may_be(most_bytes, rows, monkeypatch):
    monkeypatch.setattr(parts, "PIECE_BYTES", most_bytes)
    part = parts.Part("w", (10, 2, 3), ((2, 9), (0, 2), (0, 3)), torch.arange(42.0), True)
    found = list(part.pieces())
    starts = range(2, 9, rows)
    assert [one.box for one in found] == [((n, min(n + rows, 9)), (0, 2), (0, 3)) for n in starts]
    assert all(len(one.flat) == volume(one.box) for one in found)
    assert torch.equal(torch.cat([one.flat for one in found]), part.flat)
