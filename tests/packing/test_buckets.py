"""Rectangles of similar lengths: every sequence once, and little padding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quintet.packing.buckets import length_buckets


@given(st.lists(st.integers(0, 500), max_size=80))
def test_buckets_hold_every_nonempty_sequence_once(lengths):
    groups = length_buckets(lengths)
    assert sorted(i for g in groups for i in g) == [i for i, n in enumerate(lengths) if n]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 1000))
def test_buckets_are_no_dearer_than_one_or_one_a_length(lengths, overhead):
    def cost(groups: list[list[int]]) -> int:
        return sum(overhead + len(g) * max(lengths[i] for i in g) for g in groups)

    groups = length_buckets(lengths, overhead_tokens=overhead)
    each = [[i for i, n in enumerate(lengths) if n == length] for length in set(lengths)]
    assert cost(groups) <= min(cost([list(range(len(lengths)))]), cost(each))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=9), st.integers(1, 1000))
def test_no_cut_of_lengths_in_order_is_cheaper(lengths, overhead):
    order = sorted(lengths)

    def least(start: int) -> int:
        ends = range(start + 1, len(order) + 1)
        return min((overhead + (end - start) * order[end - 1] + least(end) for end in ends), default=0)

    groups = length_buckets(lengths, overhead_tokens=overhead)
    assert sum(overhead + len(g) * max(lengths[i] for i in g) for g in groups) == least(0)


def test_buckets_part_short_from_long():
    groups = length_buckets([10] * 50 + [1000] * 2)
    assert sorted(map(len, groups)) == [2, 50]


def test_many_distinct_lengths_take_a_bounded_search():
    lengths = list(range(1, 1001))
    groups = length_buckets(lengths)
    assert sum(len(g) * max(lengths[i] for i in g) for g in groups) < 1.1 * sum(lengths)
