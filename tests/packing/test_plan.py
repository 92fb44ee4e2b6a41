"""The packer keeps its promises for any lengths: hard budget, every sample once, the same count on each rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.errors import UserError
from quintet.packing import Alignment, alignment, length_buckets, plan_microbatches, split_evenly

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)


@given(
    LENGTHS, st.integers(1, 8), st.integers(0, 200), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])
)
def test_every_sample_once_within_the_budget(lengths, dp, slack, tp, cp):
    align = alignment(tp=tp, sp=tp > 1, cp=cp)
    budget = -(-align.row([max(lengths)]) // cp) + slack
    plan = plan_microbatches(lengths, dp=dp, budget=budget, alignment=align, cp=cp, quadratic=0.01)
    assert sorted(i for rank in plan.microbatches for row in rank for i in row) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan.microbatches}) == 1
    for rank in plan.microbatches:
        for row in rank:
            assert align.row([lengths[i] for i in row]) <= budget * cp


@given(LENGTHS, st.integers(1, 8))
def test_local_positions_follow_the_samples(lengths, dp):
    plan = plan_microbatches(lengths, dp=dp, budget=300)
    for r in range(dp):
        samples = plan.samples_of(r)
        assert [[samples[k] for k in row] for row in plan.local(r)] == plan.microbatches[r]


def test_more_ranks_than_samples_leaves_empty_microbatches():
    assert plan_microbatches([5], dp=4, budget=8).microbatches == [[[0]], [[]], [[]], [[]]]


def test_a_sample_over_the_budget_is_named():
    with pytest.raises(UserError, match="sample 1 has 9 tokens"):
        plan_microbatches([3, 9], dp=1, budget=8)


def test_long_samples_are_balanced_by_their_quadratic_cost():
    plan = plan_microbatches([100, 50, 50], dp=2, budget=200, quadratic=1.0)
    assert sorted(map(sorted, (plan.samples_of(0), plan.samples_of(1)))) == [[0], [1, 2]]


@given(st.lists(st.integers(0, 500), max_size=80))
def test_buckets_hold_every_nonempty_sequence_once(lengths):
    groups = length_buckets(lengths)
    assert sorted(i for g in groups for i in g) == [i for i, n in enumerate(lengths) if n]


def test_buckets_part_short_from_long():
    groups = length_buckets([10] * 50 + [1000] * 2)
    assert sorted(map(len, groups)) == [2, 50]


def test_alignment_of_layouts():
    assert alignment() == Alignment(1, 1)
    assert alignment(tp=4, sp=True) == Alignment(1, 4)
    assert alignment(tp=4) == Alignment(1, 1)
    assert alignment(cp=2) == Alignment(4, 4)
    assert alignment(tp=4, sp=True, cp=2) == Alignment(4, 8)


@given(st.integers(0, 100), st.integers(1, 20))
def test_split_evenly(count, parts):
    ranges = split_evenly(count, parts)
    assert [i for r in ranges for i in r] == list(range(count))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
