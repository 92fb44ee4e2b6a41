"""Alignment by its purpose: whatever the lengths and the layout, every cut comes out even and FP8's multiples hold."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.packing.align import FP8_TOKENS, Alignment, alignment, alignment_of, row_buckets
from quintet.packing.context import held_ranges
from quintet.recipe.schema import Engine, Layout

LENGTHS = st.lists(st.integers(1, 300), max_size=20)
TP = st.sampled_from([1, 2, 3, 4, 8])
CP = st.sampled_from([1, 2, 3, 4, 8])


@given(LENGTHS, TP, st.booleans(), CP, st.sampled_from([None, *FP8_TOKENS]))
def test_every_rank_gets_an_equal_whole_slice(lengths, tp, sp, cp, fp8):
    """Sequences cut by cp in zigzag, then what a cp rank has by tp: the cuts themselves, not their arithmetic."""
    align = alignment(tp=tp, sp=sp, cp=cp, fp8=fp8)
    padded, total = [align.padded(n) for n in lengths], align.row(lengths)
    tail = total - sum(padded)
    assert all(n <= p < n + align.sequence for n, p in zip(lengths, padded, strict=True))
    assert 0 <= tail < align.total or not lengths

    row = padded + [tail] * (tail > 0)
    held = [[i for part in held_ranges(row, cp, rank) for i in part] for rank in range(cp)]
    assert sorted(i for part in held for i in part) == list(range(total))
    slices = []
    for part in held:
        parts = tp if sp else 1
        assert len(part) % parts == 0
        slices += [part[k * len(part) // parts : (k + 1) * len(part) // parts] for k in range(parts)]
    assert len({len(s) for s in slices}) == 1
    assert len(slices[0]) % FP8_TOKENS.get(fp8, 1) == 0

    if cp > 1:  # every rank holds as much of every sequence, and pairs of equal work under the causal mask
        for begin, n in zip(accumulate(row, initial=0), row, strict=False):
            work = [sum(i - begin + 1 for i in part if begin <= i < begin + n) for part in held]
            assert n % (2 * cp) == 0
            assert len(set(work)) == 1


@given(TP, st.booleans(), CP, st.sampled_from([None, *FP8_TOKENS]))
def test_no_smaller_multiple_would_do(tp, sp, cp, fp8):
    """Each prime factor taken off a multiple breaks one of the cuts: nothing is padded needlessly."""
    align = alignment(tp=tp, sp=sp, cp=cp, fp8=fp8)
    slices, tokens = (tp if sp else 1) * cp, FP8_TOKENS.get(fp8, 1)
    for prime in (2, 3):
        if align.total % prime == 0:
            less = align.total // prime
            assert less % (slices * tokens) or less % align.sequence
    assert align.sequence == (2 * cp if cp > 1 else 1)


def test_alignment_of_layouts():
    assert alignment() == Alignment(1, 1)
    assert alignment(tp=4, sp=True) == Alignment(1, 4)
    assert alignment(tp=4) == Alignment(1, 1)
    assert alignment(cp=2) == Alignment(4, 4)
    assert alignment(tp=4, sp=True, cp=2) == Alignment(4, 8)
    assert alignment(tp=3, sp=True, cp=2) == Alignment(4, 12)
    assert alignment(fp8="tensorwise") == Alignment(1, 16)
    assert alignment(tp=2, cp=2, fp8="tensorwise") == Alignment(4, 32)
    assert alignment(tp=2, sp=True, cp=2, fp8="tensorwise") == Alignment(4, 64)
    assert alignment(tp=2, sp=True, fp8="blockwise") == Alignment(1, 256)


def test_a_row_is_aligned_for_the_ranks_that_share_it():
    """Whatever the layout's own cp: a row on one rank of a cp 4 layout is not padded for four."""
    layout = Layout(tp=2, sp=True, cp=4)
    assert [alignment_of(layout, cp, None) for cp in (1, 2, 4)] == [
        Alignment(1, 2),
        Alignment(4, 4),
        Alignment(8, 8),
    ]
    assert alignment_of(Layout(tp=2, cp=4), 1, None) == Alignment()
    assert alignment_of(Layout(tp=2, sp=True, cp=8), 8, Engine(fp8="blockwise")) == Alignment(16, 2048)
    few = Engine(row_buckets=True, tokens_per_microbatch_per_rank=1024)
    assert [alignment_of(layout, cp, few).buckets[-1] for cp in (1, 4)] == [1024, 4096]
    assert alignment_of(layout, 4, few).row([]) == 8


@given(TP, CP, st.integers(1, 40_000), st.sampled_from([None, "blockwise"]), LENGTHS)
def test_rows_of_few_sizes_stay_within_the_budget(tp, cp, budget, fp8, lengths):
    layout = Layout(tp=tp, sp=tp > 1, cp=cp)
    how = {"tokens_per_microbatch_per_rank": budget, "fp8": fp8}
    plain, few = (alignment_of(layout, cp, Engine(row_buckets=on, **how)) for on in (False, True))
    assert (few.sequence, few.total, plain.buckets) == (plain.sequence, plain.total, ())
    assert few.room(budget * cp) == plain.room(budget * cp)
    assert len(few.buckets) <= 20
    row, padded = plain.row(lengths), few.row(lengths)
    if not lengths or row > plain.room(budget * cp):
        assert padded == row
    else:
        assert padded in few.buckets
        assert padded <= budget * cp
        assert padded <= max(row * 1.125, few.buckets[0])


def test_what_cannot_be_aligned_is_refused():
    assert held_ranges([8, 4], 2, 0) == [range(2), range(6, 8), range(8, 9), range(11, 12)]
    with pytest.raises(ValueError, match="a sequence of 6 tokens cannot be cut into 4 equal chunks"):
        held_ranges([8, 6], 2, 0)
    with pytest.raises(ValueError, match="multiple of sequence"):
        Alignment(sequence=4, total=6)
    with pytest.raises(ValueError, match="every bucket"):
        Alignment(total=8, buckets=(8, 12))
    with pytest.raises(ValueError, match="no row of a multiple of 16 tokens fits 15"):
        row_buckets(15, total=16)


@given(
    st.integers(1, 64),
    st.integers(1, 20_000),
    st.floats(0.01, 1.0),
    st.integers(0, 5000),
    st.integers(1, 20_000),
)
def test_buckets_bound_the_waste(total, top, waste, smallest, tokens):
    top = max(top, total)
    buckets = row_buckets(top, total=total, waste=waste, smallest=smallest)
    assert buckets[-1] == top // total * total
    assert all(size % total == 0 for size in buckets)
    assert list(buckets) == sorted(set(buckets))
    plain, padded = Alignment(total=total), Alignment(total=total, buckets=buckets)
    row = plain.row([tokens])
    if row <= buckets[-1]:
        assert padded.row([tokens]) in buckets
        assert 0 <= padded.row([tokens]) - row <= max(waste * row * (1 + 1e-9), smallest)
    for lower, upper in pairwise(buckets):  # the shortest row that takes `upper` wastes most
        assert upper - (lower + total) <= max(waste * (lower + total) * (1 + 1e-9), smallest)
    assert padded.room(tokens) == max((size for size in buckets if size <= tokens), default=0)
    assert plain.room(tokens) == tokens // total * total


def test_buckets_are_few():
    assert len(row_buckets(8192, waste=0.125, smallest=1024)) == 19
    assert len(row_buckets(65536, total=128, waste=0.125, smallest=8192)) == 19
    assert row_buckets(64, total=16, waste=0.01) == (16, 32, 48, 64)
