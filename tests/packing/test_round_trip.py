"""Pack, then unpack: whatever the lengths, every token of every sample is in the rows once, and padding in no loss."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quintet.engine.row import MicroBatch, pack
from quintet.packing.align import FP8_TOKENS, Alignment, alignment, row_buckets
from quintet.packing.context import held_ranges
from quintet.packing.plan import plan_microbatches, target_counts

LENGTHS = st.lists(st.integers(1, 40), max_size=12)


def batch(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids that tell sample and position (and are never 0, as padding is), offsets, and which are trained."""
    ids = [1000 * (i + 1) + t for i, n in enumerate(lengths) for t in range(n)]
    generator = torch.Generator().manual_seed(sum(lengths))
    trained = torch.rand(len(ids), generator=generator) < 0.7
    return torch.tensor(ids, dtype=torch.int64), torch.tensor([0, *lengths]).cumsum(0), trained


def whole_row(parts: list[MicroBatch]) -> tuple[Tensor, Tensor]:
    """Token ids and positions [T] in row order, from the parts of all cp ranks; each row position in one part only."""
    total = sum(part.tokens for part in parts)
    ids, positions = torch.full((total,), -1), torch.full((total,), -1)
    for part in parts:
        held = torch.tensor([i for r in held_ranges(part.lengths, part.cp, part.cp_rank) for i in r])
        assert len(held) == part.tokens
        assert (ids[held] == -1).all()
        ids[held], positions[held] = part.input_ids[0], part.positions
    assert (ids >= 0).all()
    return ids, positions


def check_row(
    parts: list[MicroBatch], samples: list[int], flat: tuple[Tensor, Tensor, Tensor], align: Alignment
) -> None:
    """Every token restored, in order, and nothing but padding besides; trained tokens told right on every rank."""
    values, offsets, trained = flat
    ids, positions = whole_row(parts)
    sizes = [int(offsets[i + 1] - offsets[i]) for i in samples]
    assert len(ids) == align.row(sizes) == sum(parts[0].lengths)
    begin = 0
    for at, n in enumerate(parts[0].lengths):
        assert positions[begin : begin + n].tolist() == list(range(n))
        own = values[offsets[samples[at]] : offsets[samples[at] + 1]] if at < len(samples) else values[:0]
        assert ids[begin : begin + n].tolist() == own.tolist() + [0] * (n - len(own))
        begin += n

    for head in range(len(parts[0].targets)):
        ahead, sets = head + 1, [part.targets[head] for part in parts]
        want = [t for i in samples for t in range(offsets[i] + ahead, offsets[i + 1]) if trained[t]]
        for part, targets in zip(parts, sets, strict=True):
            assert targets.token_index.tolist() == want
            assert targets.sample.tolist() == [int(values[t]) // 1000 - 1 for t in want]
            # The token so far before a target predicts it, and is held by the rank that says so.
            assert (part.input_ids[0][targets.predictors] == targets.ids - ahead).all()
            assert targets.ids.tolist() == values[targets.token_index[targets.place]].tolist()
        places = torch.cat([targets.place for targets in sets])
        assert sorted(places.tolist()) == list(range(len(want)))


@given(
    lengths=LENGTHS,
    dp=st.integers(1, 5),
    slack=st.integers(0, 60),
    tp=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2, 4]),
    fp8=st.sampled_from([None, *FP8_TOKENS]),
    bucketed=st.booleans(),
    ahead=st.sampled_from([(1,), (1, 2, 3)]),
)
def test_every_token_comes_back(lengths, dp, slack, tp, cp, fp8, bucketed, ahead):
    """Planned over ranks and micro-batches, packed, cut, and put together again."""
    align = alignment(tp=tp, sp=tp > 1, cp=cp, fp8=fp8)
    budget = -(-align.row([max(lengths, default=0)]) // cp) + slack
    if bucketed:
        buckets = row_buckets(budget * cp, total=align.total, waste=0.3, smallest=32)
        align = Alignment(align.sequence, align.total, buckets)
    plan = plan_microbatches(lengths, dp=dp, budget=budget, alignment=align, cp=cp)
    flat, seen = batch(lengths), []
    for cells in plan.rounds:
        for cell in cells:
            parts = [pack(*flat, cell.samples, align, cell.cp, r, ahead) for r in range(cell.cp)]
            check_row(parts, cell.samples, flat, align)
            assert len({part.tokens for part in parts}) == 1
            assert parts[0].tokens <= budget
            assert parts[0].tokens % (tp * FP8_TOKENS.get(fp8, 1)) == 0
            seen += cell.samples
    assert sorted(seen) == list(range(len(lengths)))


def plainly_cut(
    row: list[int | None], lengths: list[int], cp: int, rank: int, tp: int
) -> list[list[int | None]]:
    """The tp slices of what a cp rank holds of a row, by the words of the matter."""
    held, begin = [], 0
    for n in lengths:
        chunks = [row[begin + n * c // (2 * cp) : begin + n * (c + 1) // (2 * cp)] for c in range(2 * cp)]
        held += chunks[rank] + chunks[2 * cp - 1 - rank] if cp > 1 else row[begin : begin + n]
        begin += n
    return [held[len(held) * t // tp : len(held) * (t + 1) // tp] for t in range(tp)]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=12), st.integers(1, 3))
def test_each_head_has_its_own_global_count(sizes, dp):
    """It differs where prompts are shorter than the head looks ahead; micro-batches add up to it, however they are cut."""
    lengths, prompts, ahead = [p + r for p, r in sizes], [p for p, _ in sizes], (1, 2, 3)
    values, offsets, _ = batch(lengths)
    trained = torch.tensor([t >= p for p, r in sizes for t in range(p + r)], dtype=torch.bool)
    plan = plan_microbatches(lengths, dp=dp, budget=8, alignment=alignment(cp=2), cp=2)
    found = [0, 0, 0]
    for cell in (cell for cells in plan.rounds for cell in cells):
        micro = pack(values, offsets, trained, cell.samples, alignment(cp=2), 2, 0, ahead)
        found = [n + len(targets.token_index) for n, targets in zip(found, micro.targets, strict=True)]
    assert found == target_counts(lengths, prompts, ahead)
    assert found[0] == sum(r for _, r in sizes)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    chosen=st.data(),
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2, 4]),
    fp8=st.sampled_from([None, *FP8_TOKENS]),
    short=st.booleans(),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.bool, torch.float32]),
    dims=st.sampled_from([(), (3,), (2, 3)]),
)
def test_any_field_is_cut_as_the_tokens_are(lengths, chosen, tp, cp, fp8, short, dtype, dims):
    """Zigzag first, then the sequence-parallel slice; padding is filled and not in the mask, nor a token that has no value."""
    align = alignment(tp=tp, sp=tp > 1, cp=cp, fp8=fp8)
    samples = chosen.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    sizes = [n - short for n in lengths]
    ends = torch.tensor([0, *sizes]).cumsum(0)
    numbers = torch.arange(int(ends[-1]))
    flat = ((numbers.view(-1, *[1] * len(dims)) + torch.arange(3)[: dims[-1] if dims else 1]) % 200 + 1).to(
        dtype
    )
    flat = flat.expand(-1, *dims).contiguous() if dims else flat.reshape(-1).to(dtype)
    field = torch.nested.nested_tensor_from_jagged(flat, ends)
    parts = [pack(*batch(lengths), samples, align, cp, r) for r in range(cp)]
    row: list[int | None] = []
    for at, padded in zip([*samples, None], [*parts[0].lengths, 0], strict=False):
        own = [] if at is None else list(range(int(ends[at]), int(ends[at + 1])))
        row += own + [None] * (padded - len(own))
    for rank, part in enumerate(parts):
        for t, want in enumerate(plainly_cut(row, part.lengths, cp, rank, tp)):
            values, mask = part.cut(field, 0, tp, t)
            assert mask.tolist() == [number is not None for number in want]
            assert values.shape == (len(want), *dims)
            assert values.dtype == dtype
            for value, number in zip(values, want, strict=True):
                assert torch.equal(value, torch.zeros_like(value) if number is None else flat[number])


@given(st.integers(1, 200), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_a_batch_of_one(length, cp, tp):
    align = alignment(tp=tp, sp=tp > 1, cp=cp)
    flat = batch([length])
    check_row([pack(*flat, [0], align, cp, r) for r in range(cp)], [0], flat, align)


def test_a_last_sequence_shorter_than_one_unit():
    """cp=4 cuts in units of 8: a last sequence of one token leaves all ranks but the first with its padding alone."""
    align = alignment(cp=4)
    flat = batch([9, 1])
    parts = [pack(*flat, [0, 1], align, 4, r) for r in range(4)]
    check_row(parts, [0, 1], flat, align)
    assert parts[0].lengths == [16, 8]
    assert [2000 in part.input_ids for part in parts] == [True, False, False, False]


def test_more_ranks_than_samples_and_an_empty_batch_give_rows_of_padding():
    align = alignment(tp=2, sp=True, cp=2)
    for lengths in ([], [5]):
        flat = batch(lengths)
        plan = plan_microbatches(lengths, dp=3, budget=8, alignment=align, cp=2)
        for cell in plan.rounds[0][len(lengths) :]:
            assert not cell.samples
            parts = [pack(*flat, cell.samples, align, 2, r) for r in range(2)]
            check_row(parts, [], flat, align)
            assert [part.tokens for part in parts] == [2, 2]
            assert all(len(part.targets[0].predictors) == 0 for part in parts)
