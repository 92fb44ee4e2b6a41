"""The packer keeps its promises for any lengths: hard budget, every sample once, the same count on each rank, even costs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.errors import UserError
from quintet.packing.align import FP8_TOKENS, Alignment, alignment, row_buckets
from quintet.packing.plan import Cell, Plan, plan_microbatches, rank_cells, split_evenly, target_counts
from tests.patience import processor_s

LENGTHS = st.lists(st.integers(1, 200), max_size=60)
DP = st.integers(1, 9)


def grid(plan: Plan) -> list[list[list[int]]]:
    """Samples of a plan whose cells are whole blocks: [dp rank][round]."""
    return [[cell.samples for cell in cells] for cells in zip(*plan.rounds, strict=True)]


def cell_costs(plan: Plan, lengths: list[int], quadratic: float = 0.0) -> list[list[float]]:
    """Cost of every micro-batch: [dp rank][k]."""
    return [
        [sum(lengths[i] + quadratic * lengths[i] ** 2 for i in row) for row in rank] for rank in grid(plan)
    ]


@given(
    lengths=LENGTHS,
    dp=DP,
    slack=st.integers(0, 200),
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 4]),
    fp8=st.sampled_from([None, *FP8_TOKENS]),
    bucketed=st.booleans(),
    multiple=st.integers(1, 4),
    lockstep=st.booleans(),
)
def test_every_sample_once_within_the_budget(lengths, dp, slack, tp, cp, fp8, bucketed, multiple, lockstep):
    align = alignment(tp=tp, sp=tp > 1, cp=cp, fp8=fp8)
    if fp8 == "blockwise":  # of whose rows the shortest is longer than most of these lengths together
        lengths, slack = [7 * n for n in lengths], 7 * slack
    budget = -(-align.row([max(lengths, default=0)]) // cp) + slack
    if bucketed:
        buckets = row_buckets(budget * cp, total=align.total, waste=0.3, smallest=budget)
        align = type(align)(align.sequence, align.total, buckets)
    plan = plan_microbatches(
        lengths,
        dp=dp,
        budget=budget,
        alignment=align,
        cp=cp,
        quadratic=0.01,
        multiple=multiple,
        lockstep=lockstep,
    )
    check(plan, lengths, budget, dp * cp, lambda cell_cp: align)
    assert {cell.cp for cells in plan.rounds for cell in cells} == {cp}
    assert len(plan.rounds) >= multiple
    assert len(plan.rounds) % multiple == 0
    for cells in plan.rounds:
        for cell in cells:
            assert cell.samples == sorted(cell.samples)


def check(plan: Plan, lengths: list[int], budget: int, ranks: int, align: Callable[[int], Alignment]) -> None:
    """What every plan keeps: each rank once a round, each sample once, no cell across blocks, the budget by the cell's own
    CP size and alignment; and what ranks derive from their block's part of it is the plan."""
    assert sorted(i for cells in plan.rounds for cell in cells for i in cell.samples) == list(
        range(len(lengths))
    )
    for cells in plan.rounds:
        assert [rank for cell in cells for rank in cell.ranks] == list(range(ranks))
        for cell in cells:
            assert cell.ranks[0] // plan.block == cell.ranks[-1] // plan.block
            assert align(cell.cp).row([lengths[i] for i in cell.samples]) <= budget * cell.cp
    parts: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for rank in range(ranks):
        samples = plan.samples_of(rank // plan.block)
        found = rank_cells(plan.local(rank // plan.block), rank % plan.block)
        assert len(found) == len(plan.rounds)
        for k, (own, cells) in enumerate(zip(found, plan.rounds, strict=True)):
            (cell,) = (cell for cell in cells if rank in cell.ranks)
            assert (own.cp, own.place) == (len(cell.ranks), rank - cell.ranks[0])
            assert own.first == (rank == cell.ranks[0])
            assert [samples[at] for at in own.samples] == cell.samples
            parts.setdefault((k, tuple(cell.ranks)), []).append(own.place)
    assert all(places == list(range(len(ranks))) for (_, ranks), places in parts.items())


@given(st.data(), st.integers(1, 3), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_a_plan_may_mix_cells_of_several_sizes(data, dp, block, rounds):
    """Aligned blocks of a power of two, in any mix: what each rank derives fits together."""

    def split(first: int, size: int) -> Iterator[range]:
        if size == 1 or data.draw(st.booleans()):
            yield range(first, first + size)
            return
        yield from split(first, size // 2)
        yield from split(first + size // 2, size // 2)

    made = [[ranks for d in range(dp) for ranks in split(d * block, block)] for _ in range(rounds)]
    numbers = itertools.count()
    table = [
        [Cell([next(numbers) for _ in range(data.draw(st.integers(0, 2)))], ranks) for ranks in row]
        for row in made
    ]
    check(Plan(table, block), [3] * next(numbers), 16, dp * block, lambda cp: alignment(cp=cp))


@given(LENGTHS, DP, st.booleans())
def test_the_same_lengths_give_the_same_plan(lengths, dp, lockstep):
    plans = [plan_microbatches(lengths, dp=dp, budget=300, quadratic=0.1, lockstep=lockstep) for _ in "ab"]
    assert plans[0] == plans[1]


@given(LENGTHS, DP)
def test_local_positions_follow_the_samples(lengths, dp):
    plan = plan_microbatches(lengths, dp=dp, budget=300)
    for r in range(dp):
        samples = plan.samples_of(r)
        backwards = samples[::-1]
        for order, local in ((samples, plan.local(r)), (backwards, plan.local(r, backwards))):
            assert [[order[k] for k in cell.samples] for (cell,) in local] == grid(plan)[r]


def test_a_batch_of_one_of_none_and_of_fewer_samples_than_ranks():
    assert grid(plan_microbatches([5], dp=4, budget=8)) == [[[0]], [[]], [[]], [[]]]
    assert grid(plan_microbatches([], dp=2, budget=8)) == [[[]], [[]]]
    assert grid(plan_microbatches([], dp=1, budget=8, multiple=3)) == [[[], [], []]]
    plan = plan_microbatches([8, 8, 8], dp=4, budget=8, lockstep=False)
    assert sorted(map(len, (r[0] for r in grid(plan)))) == [0, 1, 1, 1]


def test_a_sample_over_the_budget_is_named():
    with pytest.raises(UserError, match=r"sample 1 has 9 tokens, 9 on each rank.*per_rank=8"):
        plan_microbatches([3, 9], dp=1, budget=8)
    # 15 tokens take a row of 16, but the budget holds only 12 in whole multiples of 4.
    with pytest.raises(
        UserError, match=r"sample 0 has 15 tokens, 8 on each rank.* or raise critic.layout.cp"
    ):
        plan_microbatches([15], dp=1, budget=7, cp=2, alignment=alignment(cp=2), key="critic.layout")


@given(
    st.lists(st.integers(50, 100), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_no_rank_raises_the_count_while_another_has_room(lengths, dp, multiple, lockstep):
    """Only two samples of 50 can share a row here, so the fewest rows are known, over all ranks."""
    plan = plan_microbatches(lengths, dp=dp, budget=100, multiple=multiple, lockstep=lockstep)
    paired = sum(1 for n in lengths if n == 50) // 2
    fewest = max(-(-(len(lengths) - paired) // (dp * multiple)), 1) * multiple
    assert len(plan.rounds) == fewest


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(2, 3), st.floats(0, 1), st.booleans()
)
def test_costs_are_within_four_thirds_of_the_best(lengths, dp, quadratic, lockstep):
    """Graham's bound, against every possible assignment."""
    plan = plan_microbatches(lengths, dp=dp, budget=1000, quadratic=quadratic, lockstep=lockstep)
    worst = max(map(sum, cell_costs(plan, lengths, quadratic)))
    cost = [n + quadratic * n * n for n in lengths]
    best = min(
        max(sum(c for c, r in zip(cost, ranks, strict=True) if r == k) for k in range(dp))
        for ranks in itertools.product(range(dp), repeat=len(lengths))
    )
    assert worst <= (4 / 3 - 1 / (3 * dp)) * best * (1 + 1e-9)


@given(LENGTHS, DP, st.floats(0, 0.1), st.integers(200, 400))
def test_ranks_differ_by_less_than_their_microbatches(lengths, dp, quadratic, budget):
    plan = plan_microbatches(lengths, dp=dp, budget=budget, quadratic=quadratic)
    costs = cell_costs(plan, lengths, quadratic)
    total = [sum(rank) for rank in costs]
    steps = list(zip(*costs, strict=True))
    assert max(total) - min(total) <= max(max(step) - min(step) for step in steps) * (1 + 1e-9)
    assert [max(step) for step in steps] == sorted((max(step) for step in steps), reverse=True)


@given(LENGTHS, DP, st.floats(0, 0.1), st.integers(1, 4))
def test_ranks_are_even_where_they_meet_at_the_end(lengths, dp, quadratic, multiple):
    """Room aplenty: no rank has more than the mean and the costliest sample, no micro-batch more than its share of that."""
    plan = plan_microbatches(
        lengths, dp=dp, budget=60 * 200, quadratic=quadratic, multiple=multiple, lockstep=False
    )
    largest = max((n + quadratic * n * n for n in lengths), default=0.0)
    costs = cell_costs(plan, lengths, quadratic)
    mean = sum(map(sum, costs)) / dp
    for rank in costs:
        assert sum(rank) <= mean + largest * (1 - 1 / dp) + 1e-6
        assert max(rank) <= sum(rank) / multiple + largest * (1 - 1 / multiple) + 1e-6


def test_long_samples_are_balanced_by_their_quadratic_cost():
    for lockstep in (True, False):
        plan = plan_microbatches([100, 50, 50], dp=2, budget=200, quadratic=1.0, lockstep=lockstep)
        assert sorted(map(sorted, (plan.samples_of(0), plan.samples_of(1)))) == [[0], [1, 2]]


def test_one_rank_packs_evenly_and_to_the_last_token():
    (costs,) = cell_costs(plan_microbatches([60, 30, 30, 30, 30], dp=1, budget=120), [60, 30, 30, 30, 30])
    assert costs == [90, 90]
    assert len(plan_microbatches([60, 40] * 3, dp=1, budget=100).rounds) == 3


def test_lockstep_puts_long_samples_side_by_side():
    """Two long samples, four ranks: together they hold up one step, apart they would hold up two."""
    plan = plan_microbatches([90, 90] + [10] * 40, dp=4, budget=100, multiple=2)
    first, second = zip(*cell_costs(plan, [90, 90] + [10] * 40), strict=True)
    assert max(first) + max(second) <= 150  # 145 a rank is the mean
    plan = plan_microbatches([90, 90] + [10] * 40, dp=4, budget=100, multiple=2, lockstep=False)
    assert max(map(sum, cell_costs(plan, [90, 90] + [10] * 40))) <= 150


def long_tail(kind: str, count: int, budget: int, seed: int) -> list[int]:
    """Response lengths as RL sees them."""
    rng = random.Random(seed)
    draw = {
        "lognormal": lambda: rng.lognormvariate(math.log(budget / 16), 1.0),
        "pareto": lambda: budget / 32 * rng.paretovariate(1.1),
        # One in ten runs into the limit on response tokens.
        "cut off": lambda: budget if rng.random() < 0.1 else rng.randint(budget // 50, budget // 4),
        # Between a tenth and most of the budget: hard to pack.
        "bulky": lambda: rng.uniform(0.1, 0.8) * budget,
    }[kind]
    return [min(budget, max(1, int(draw()))) for _ in range(count)]


# The worst of five seeds as measured, to the mean cost of a rank; 1 is the least any plan can have. "steps" is Σ_k max_rank
# and "ranks" is max_rank Σ_k, in lockstep; "alone" is max_rank Σ_k without. A dearness of 1 makes attention as dear as
# the rest at the budget's length (a 1.5B model at 32k): a long sample then costs up to twice what a row of short ones
# can, and in lockstep its step cannot be filled up.
MEASURED = [
    # kind, dearness, steps, ranks, alone
    ("lognormal", 0.0, 1.002, 1.001, 1.001),
    ("lognormal", 1.0, 1.053, 1.045, 1.001),
    ("pareto", 0.0, 1.006, 1.002, 1.004),
    ("pareto", 1.0, 1.031, 1.016, 1.003),
    ("cut off", 0.0, 1.003, 1.001, 1.002),
    ("cut off", 1.0, 1.027, 1.025, 1.020),
    ("bulky", 0.0, 1.004, 1.001, 1.001),
    ("bulky", 1.0, 1.007, 1.001, 1.001),
]


@pytest.mark.parametrize(("kind", "dearness", "steps", "ranks", "alone"), MEASURED)
def test_imbalance_on_long_tails(kind, dearness, steps, ranks, alone):
    """512 samples on 8 ranks: the fewest micro-batches there can be, one more for bulky samples; costs even."""
    budget, dp = 16384, 8
    for seed in range(5):
        lengths = long_tail(kind, 512, budget, seed)
        quadratic = dearness / budget
        mean = sum(n + quadratic * n * n for n in lengths) / dp
        fewest = -(-sum(lengths) // (budget * dp))
        for lockstep in (True, False):
            plan = plan_microbatches(lengths, dp=dp, budget=budget, quadratic=quadratic, lockstep=lockstep)
            costs = cell_costs(plan, lengths, quadratic)
            assert len(costs[0]) <= fewest + (kind == "bulky")
            if lockstep:
                assert sum(map(max, zip(*costs, strict=True))) <= steps * mean
            assert max(map(sum, costs)) <= (ranks if lockstep else alone) * mean


@pytest.mark.parametrize("lockstep", [True, False])
def test_planning_is_fast(lockstep):
    lengths = long_tail("lognormal", 4096, 16384, 0)
    took = processor_s(
        lambda: plan_microbatches(lengths, dp=64, budget=16384, quadratic=1 / 16384, lockstep=lockstep)
    )
    assert took < 1.0  # 0.1 and 0.15 s measured


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
def test_targets_are_the_responses_tokens_with_enough_before_them(sizes):
    prompts, lengths = [prompt for prompt, _ in sizes], [sum(both) for both in sizes]
    ahead = (1, 2, 3, 4)
    expected = [
        sum(at >= distance for prompt, n in zip(prompts, lengths, strict=True) for at in range(prompt, n))
        for distance in ahead
    ]
    assert target_counts(lengths, prompts, ahead) == expected
    assert target_counts(lengths, prompts) == expected[:1]


@given(st.integers(0, 100), st.integers(1, 20))
def test_split_evenly(count, parts):
    ranges = split_evenly(count, parts)
    assert [i for r in ranges for i in r] == list(range(count))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
