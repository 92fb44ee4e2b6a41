"""Cutting into buckets: everything once, in order, aligned, and no larger than asked for where it can be cut."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from quintet.models.mcore import box_sizes, split, volume, whole_box
from quintet.sync.buckets import ALIGNMENT, Entry, in_buckets, slots

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@st.composite
def entries(draw) -> tuple[Entry, tuple[int, ...]]:
    """A tensor, and its units."""
    units = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    shape = tuple(unit * draw(st.integers(1, 12)) for unit in units)
    return Entry("", shape, whole_box(shape), draw(st.sampled_from(DTYPES))), units


wanted = st.lists(entries(), max_size=12)


@given(wanted, st.integers(1, 4096), st.booleans())
def test_buckets_hold_everything_once_in_order(wanted, size, cut):
    named = [Entry(str(i), e.shape, e.box, e.dtype) for i, (e, _) in enumerate(wanted)]
    units = {str(i): units for i, (_, units) in enumerate(wanted)}
    nothing = Entry("nothing", (4, 2), ((4, 4), (0, 2)), torch.float32)
    buckets = in_buckets([*named, nothing], size, units if cut else None)
    for bucket, after in pairwise(buckets):  # a bucket ends where the next part does not fit
        assert -(-bucket.nbytes // ALIGNMENT) * ALIGNMENT + after.entries[0].nbytes > size
    parts: dict[str, list[Entry]] = {}
    for bucket in buckets:
        end = 0
        memory = torch.zeros(-(-bucket.nbytes // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8)
        for one, view in zip(bucket.entries, bucket.views(memory), strict=True):
            assert one.offset % ALIGNMENT == 0
            assert end <= one.offset < end + ALIGNMENT
            end = one.offset + one.nbytes
            parts.setdefault(one.name, []).append(one)
            assert not cut or one.nbytes <= max(size, prod(units[one.name]) * one.dtype.itemsize)
            assert view.data_ptr() == memory.data_ptr() + one.offset
            assert (tuple(view.shape), view.dtype) == (box_sizes(one.box), one.dtype)
        assert end == bucket.nbytes
        assert end <= size or len(bucket.entries) == 1
    assert list(parts) == [one.name for one in named]
    for whole in named:
        covered = torch.zeros(whole.shape, dtype=torch.int64)
        for part in parts[whole.name]:
            covered[tuple(slice(*ends) for ends in part.box)] += 1
            edges = zip(part.box, units[whole.name], strict=True)
            assert all(start % unit == stop % unit == 0 for (start, stop), unit in edges)
        assert (covered == 1).all()
        assert cut or len(parts[whole.name]) == 1


@given(entries(), st.integers(1, 200))
def test_parts_are_no_larger_than_they_must_be(entry, limit):
    one, units = entry
    smallest = volume(tuple((0, unit) for unit in units))
    assert all(volume(box) <= max(limit, smallest) for box in split(one.box, units, limit))


@given(st.lists(st.integers(1, 5000), max_size=30))
def test_two_buckets_in_turn_and_never_two_large_ones(sizes):
    place, room = slots(sizes, 1024)
    for number, (size, slot) in enumerate(zip(sizes, place, strict=True)):
        assert size <= room[slot]
        assert size > 1024 or number == 0 or slot != place[number - 1]
    assert room[1] <= 1024  # of the usual size
    assert all(nbytes > 0 and nbytes % ALIGNMENT == 0 for nbytes in room)


def test_buckets_are_full() -> None:
    """As many parts as fit, to the last byte: of small tensors, and of one that is cut."""
    small = [Entry(str(i), (128,), ((0, 128),), torch.float32) for i in range(5)]
    assert [len(one.entries) for one in in_buckets(small, 1024)] == [2, 2, 1]
    large = Entry("", (64, 16), ((0, 64), (0, 16)), torch.float32)
    assert [one.nbytes for one in in_buckets([large], 1024, {})] == [1024] * 4
