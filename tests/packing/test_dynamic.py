"""The planner of dynamic context parallelism keeps its promises for any lengths, and finds plans that the static one cannot have."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.errors import UserError
from quintet.packing import dynamic as planner
from quintet.packing.align import FP8_TOKENS, Alignment, alignment, alignment_of, row_buckets
from quintet.packing.dynamic import smallest_fits
from quintet.packing.plan import Cell, Plan, PlanTime, cell_sizes, plan_microbatches
from quintet.packing.time_model import CellCosts, plan_times
from quintet.recipe.schema import Engine, Layout
from tests.examples import examples
from tests.packing.test_plan import check, long_tail
from tests.patience import processor_s

Mix = dict[str, Any]


def plan_cells(*args: Any, **how: Any) -> tuple[Plan, PlanTime]:
    """A plan, and how long it is modelled to take."""
    plan = planner.plan_cells(*args, **how)
    assert plan.modelled is not None
    return plan, plan.modelled


COSTS = CellCosts(fixed=5.0, quadratic=0.002, exchange=(0.05, 0.1))


@st.composite
def mixes(draw: Callable[..., Any], coupled: bool = True) -> Mix:
    """Lengths, half of the time with a tail far beyond one rank's budget, ranks, and what a layout asks of a row."""
    dp, cp, tp = draw(st.integers(1, 4)), draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([1, 2]))
    fp8 = draw(st.sampled_from([None, None, *FP8_TOKENS]))
    budget = draw(st.sampled_from([64, 100, 256])) * (8 if fp8 == "blockwise" else 1)  # a row is of 128 · tp
    few = draw(st.sampled_from([False, False, True]))

    def align(size: int) -> Alignment:
        plain = alignment(tp=tp, sp=tp > 1, cp=size, fp8=fp8)
        sizes = row_buckets(budget * size, total=plain.total, waste=0.5) if few else ()
        return replace(plain, buckets=sizes)

    room = align(cp).room(budget * cp)
    longest = st.sampled_from([min(budget // 2, room), room])
    lengths = draw(st.lists(st.integers(1, draw(longest)), max_size=30))
    short = draw(st.lists(st.integers(1, min(budget // 4, room)), max_size=40))
    return {
        "lengths": draw(st.permutations([*lengths, *short])),
        "dp": dp,
        "cp": cp,
        "budget": budget,
        "alignment": align,
        "costs": draw(st.sampled_from([CellCosts(), CellCosts(0.0), COSTS, CellCosts(20.0, 0.02, (1.0,))])),
        "multiple": draw(st.sampled_from([1, 1, 2, 4])),
        "coupled": draw(st.sampled_from([1, 2, cp, dp * cp])) if coupled else 1,
        "fill": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
    }


def keeps(plan: Plan, mix: Mix) -> None:
    """What every plan of a mix keeps."""
    ranks, align, budget = mix["dp"] * mix["cp"], mix["alignment"], mix["budget"]
    assert plan.block == mix["cp"]
    check(plan, mix["lengths"], budget, ranks, align)
    assert plan.rounds
    assert len(plan.rounds) % mix["multiple"] == 0
    for cell in itertools.chain(*plan.rounds):
        assert cell.cp & (cell.cp - 1) == 0
        assert cell.ranks[0] % cell.cp == 0
        assert cell.samples == sorted(cell.samples)


@given(mixes())
def test_every_sample_once_within_the_budget_and_no_slower_than_static(mix: Mix) -> None:
    holds(mix)


@pytest.mark.slow
@given(mixes())
@settings(max_examples=examples(3000))
def test_thousands_of_mixes_are_planned_so(mix: Mix) -> None:
    holds(mix)


def holds(mix: Mix) -> None:
    """Plan a mix, and compare the plan and what it says of itself with the static one and with a time that is counted anew."""
    plan, told = plan_cells(**mix)
    keeps(plan, mix)
    how = {name: mix[name] for name in ("costs", "alignment", "coupled", "fill")}
    assert told.time == plan_times(plan, mix["lengths"], **how)[0]
    assert told.bound <= told.time * (1 + 1e-9)
    lengths = sorted(mix["lengths"], reverse=True)
    static = plan_microbatches(
        lengths,
        dp=mix["dp"],
        cp=mix["cp"],
        budget=mix["budget"],
        alignment=mix["alignment"](mix["cp"]),
        quadratic=mix["costs"].quadratic,
        multiple=mix["multiple"],
        lockstep=mix["coupled"] > mix["cp"],
    )
    assert told.static == plan_times(static, lengths, **how)[0]
    assert told.time <= told.static


@given(mixes(), st.randoms(use_true_random=False))
def test_a_plan_depends_on_lengths_and_not_on_their_order(mix: Mix, shuffle: random.Random) -> None:
    """Up to which of several samples of the same length is which."""

    def shown(lengths: list[int]) -> list[Any]:
        plan, told = plan_cells(**{**mix, "lengths": lengths})
        rounds = [
            [(cell.ranks, sorted(lengths[i] for i in cell.samples)) for cell in row] for row in plan.rounds
        ]
        return [rounds, told]

    others = list(mix["lengths"])
    shuffle.shuffle(others)
    assert shown(mix["lengths"]) == shown(others) == shown(others)


@given(mixes())
def test_idle_ranks_get_what_would_then_be_done_sooner(mix: Mix) -> None:
    """No sample that shares a cell is done sooner where a rank has nothing to do in all rounds."""
    plan, told = plan_cells(**mix)
    align, lengths = mix["alignment"], mix["lengths"]
    busy = {rank for row in plan.rounds for cell in row if cell.samples for rank in cell.ranks}
    idle = next((rank for rank in range(mix["dp"] * mix["cp"]) if rank not in busy), None)
    if idle is None:
        return
    for number, row in enumerate(plan.rounds):
        for moved in (i for cell in row if len(cell.samples) > 1 for i in cell.samples):
            if align(1).row([lengths[moved]]) > mix["budget"]:
                continue
            alone = next((k for k, cell in enumerate(row) if cell.ranks == range(idle, idle + 1)), None)
            if alone is None:
                continue
            other = [Cell([i for i in cell.samples if i != moved], cell.ranks) for cell in row]
            other[alone] = Cell([moved], row[alone].ranks)
            rounds = [*plan.rounds[:number], other, *plan.rounds[number + 1 :]]
            how = {name: mix[name] for name in ("costs", "alignment", "coupled", "fill")}
            assert plan_times(Plan(rounds, plan.block), lengths, **how)[0] >= told.time * (1 - 1e-9)


def test_of_the_ranks_of_a_cell_none_waits() -> None:
    """Where nothing else couples ranks, cells go from the largest to the smallest: sums along the tree of groups are the time."""
    rng = random.Random(0)
    for _ in range(50):
        lengths = [min(6000, max(1, int(rng.lognormvariate(6, 1.2)))) for _ in range(60)]
        plan, told = plan_cells(lengths, dp=2, cp=8, budget=1024, alignment=plain, costs=COSTS)
        sums = [0.0] * 16
        for cell in itertools.chain(*plan.rounds):
            for rank in cell.ranks:
                sums[rank] += COSTS.cell([lengths[i] for i in cell.samples], cell.cp, plain(cell.cp))
        assert told.time == pytest.approx(max(sums))


def plain(cp: int) -> Alignment:
    return alignment(cp=cp)


@settings(max_examples=examples(40))
@given(mixes(coupled=False))
def test_more_ranks_take_no_longer(mix: Mix) -> None:
    """The bound never goes up; a plan's time, by rules that are only good in the mean, by a quarter at the most. In one of a
    thousand mixes it does, seen so far by up to 15%: short samples on few ranks, whose rows are mostly padding."""
    mix["multiple"] = 1
    _, few = plan_cells(**mix)
    _, more = plan_cells(**{**mix, "dp": mix["dp"] + 1})
    _, twice = plan_cells(**{**mix, "dp": 2 * mix["dp"]})
    assert twice.bound <= few.bound * (1 + 1e-9)
    assert more.bound <= few.bound * (1 + 1e-9)
    assert max(more.time, twice.time) <= 1.25 * few.time


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.01, 0.05]),
    st.sampled_from([(0.0,), (0.1, 0.2), (0.5, 0.8), (2.0,)]),
)
def test_the_time_is_near_the_best(lengths: list[int], quadratic: float, exchange: tuple[float, ...]) -> None:
    """Of four ranks, against every way to give each sample its ranks."""
    costs = CellCosts(0.0, quadratic, exchange)
    _, told = plan_cells(lengths, dp=1, cp=4, budget=1000, alignment=plain, costs=costs)
    groups = [range(4), range(2), range(2, 4), *(range(rank, rank + 1) for rank in range(4))]
    best = math.inf
    for chosen in itertools.product(groups, repeat=len(lengths)):
        sums = [0.0] * 4
        for n, where in zip(lengths, chosen, strict=True):
            for rank in where:
                sums[rank] += costs.cell([n], len(where), plain(len(where)))
        best = min(best, max(sums))
    assert told.time <= 4 / 3 * best + 4  # a dummy's row is not empty


MISTAKES = {
    "alignment of one rank's rows": lambda patch: patch.setattr(
        planner,
        "_levels",
        lambda lengths, cp, budget, align, costs, of=planner._levels: of(
            lengths, cp, budget, lambda size: align(1), costs
        ),
    ),
    "a sample left out": lambda patch: patch.setattr(
        planner,
        "_choices",
        lambda *of, all=planner._choices: (
            [(level, samples[1:]) for level, samples in one if len(samples) > 1] for one in all(*of)
        ),
    ),
    "a sample twice": lambda patch: patch.setattr(
        planner,
        "_choices",
        lambda *of, all=planner._choices: (
            [(level, [*samples, samples[-1]]) for level, samples in one] for one in all(*of)
        ),
    ),
    "a round too many": lambda patch: patch.setattr(
        planner, "_nested", lambda classes, ranks, count, of=planner._nested: of(classes, ranks, count + 1)
    ),
    "groups across blocks": lambda patch: patch.setattr(
        planner,
        "_beside",
        lambda rounds, of=planner._beside: [
            [(range(where.start + 1, where.stop + 1), cell) for where, cell in row if where.stop < 4]
            + [one for one in row if one[0].stop >= 4]
            for row in of(rounds)
        ],
    ),
    "a budget of all ranks for one": lambda patch: patch.setattr(
        planner,
        "_levels",
        lambda lengths, cp, budget, align, costs, of=planner._levels: of(
            lengths, cp, budget * cp, align, costs
        ),
    ),
    "ranks without samples left out": lambda patch: patch.setattr(
        planner,
        "_cells",
        lambda row, order, ranks, of=planner._cells: [cell for cell in of(row, order, ranks) if cell.samples],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each planted one a plan tells among some hundred mixes, and none of them of the planner as it is."""
    rng = random.Random(0)
    of = [
        {
            "lengths": [
                rng.choice([rng.randint(1, 30), rng.randint(1, 200)]) for _ in range(rng.randint(1, 20))
            ],
            "dp": rng.randint(1, 3),
            "cp": 4,
            "budget": 64,
            "alignment": plain,
            "costs": COSTS,
            "multiple": rng.choice([1, 2]),
            "coupled": rng.choice([1, 4, 12]),
        }
        for _ in range(100)
    ]
    for mix in of:
        keeps(plan_cells(**mix)[0], mix)
    MISTAKES[mistake](monkeypatch)

    def holds(mix: Mix) -> bool:
        try:
            keeps(plan_cells(**mix)[0], mix)
        except (AssertionError, IndexError):
            return False
        return True

    assert not all(holds(mix) for mix in of)


# mixes that are told by name


def shape(plan: Plan) -> list[list[tuple[int, int]]]:
    """Of each round (ranks, samples) of the cells."""
    return [[(cell.cp, len(cell.samples)) for cell in row] for row in plan.rounds]


def test_24_ranks_in_blocks_of_eight() -> None:
    lengths = [4000] + [700] * 21
    costs = CellCosts(10.0, exchange=(0.2,))
    plan, told = plan_cells(lengths, dp=3, cp=8, budget=1024, alignment=plain, costs=costs)
    keeps(plan, {"lengths": lengths, "dp": 3, "cp": 8, "budget": 1024, "alignment": plain, "multiple": 1})
    assert {cell.cp for cell in itertools.chain(*plan.rounds)} > {1}
    assert told.static is not None
    assert told.time < 0.95 * told.static


def test_one_giant_and_many_tiny() -> None:
    """The giant has a block to itself for as long as it takes; the tiny go to other ranks, one each at a time."""
    lengths = [7000] + [100] * 200
    for coupled in (1, 32):
        plan, told = plan_cells(
            lengths, dp=4, cp=8, budget=1024, alignment=plain, costs=CellCosts(10.0, 0.0005), coupled=coupled
        )
        (giant,) = [cell for cell in itertools.chain(*plan.rounds) if 0 in cell.samples]
        assert (giant.cp, giant.samples) == (8, [0])
        tiny = [cell for cell in itertools.chain(*plan.rounds) if cell.samples and 0 not in cell.samples]
        assert {cell.cp for cell in tiny} == {1}
        assert {rank for cell in tiny for rank in cell.ranks} >= set(range(32)) - set(giant.ranks)
        assert told.time <= 1.01 * told.bound


@pytest.mark.parametrize("coupled", [1, 4])
def test_one_sample_is_cut_over_all_ranks_of_a_block(coupled: int) -> None:
    plan, _ = plan_cells([500], dp=2, cp=4, budget=1024, alignment=plain, costs=CellCosts(), coupled=coupled)
    assert sorted(shape(plan)[0])[-1] == (4, 1)
    assert len(plan.rounds) == 1


def test_fewer_samples_than_ranks() -> None:
    """Three samples, two blocks of four: no rank stands by while another could share its work."""
    plan, told = plan_cells([400, 400, 800], dp=2, cp=4, budget=1024, alignment=plain, costs=CellCosts(1.0))
    assert shape(plan) == [[(4, 1), (2, 1), (2, 1)]] or shape(plan) == [[(2, 1), (2, 1), (4, 1)]]
    assert told.time <= 1.05 * told.bound


def test_equal_lengths_that_fit_a_rank_are_not_cut() -> None:
    plan, told = plan_cells([1000] * 64, dp=2, cp=4, budget=1024, alignment=plain, costs=CellCosts(10.0))
    assert shape(plan) == [[(1, 1)] * 8] * 8
    assert told.time == told.bound


def test_no_samples_are_a_round_without_any() -> None:
    plan, _ = plan_cells([], dp=2, cp=2, budget=64, alignment=plain, costs=CellCosts(), multiple=4)
    assert [sum(size for size, _ in row) for row in shape(plan)] == [4] * 4


def test_tiny_samples_stay_out_of_large_cells_where_padding_is_dear() -> None:
    """FP8 in tiles of 128 under tp 2 · sp: a row of eight ranks is a multiple of 2048 tokens."""

    def align(cp: int) -> Alignment:
        return alignment(tp=2, sp=True, cp=cp, fp8="blockwise")

    lengths = [16000] + [20] * 30
    plan, _ = plan_cells(lengths, dp=1, cp=8, budget=2048, alignment=align, costs=CellCosts(16.0))
    assert all(0 not in cell.samples or cell.samples == [0] for cell in itertools.chain(*plan.rounds))
    keeps(plan, {"lengths": lengths, "dp": 1, "cp": 8, "budget": 2048, "alignment": align, "multiple": 1})


def test_a_sample_that_fits_no_block_is_named_with_the_smallest_settings_that_it_fits() -> None:
    how: Mix = {"dp": 1, "alignment": plain, "costs": CellCosts()}
    for blocks, larger in ((4, ", or layout.cp=16;"), (1, ";")):  # of 16 ranks and of 4
        with pytest.raises(UserError, match=r"sample 1 has 999 tokens, 250 .*per_rank=100\. It fits") as told:
            plan_cells([3, 999, 500], cp=4, budget=100, **how | {"dp": blocks})
        assert f"tokens_per_microbatch_per_rank=250{larger}" in str(told.value)
    plan_cells([999], cp=4, budget=250, **how)
    plan_cells([999], cp=16, budget=100, **how)
    for cp, budget in ((4, 249), (8, 100)):
        with pytest.raises(UserError, match="sample 0 has 999"):
            plan_cells([999], cp=cp, budget=budget, **how)


@given(
    st.integers(1, 5000),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(16, 600),
    st.sampled_from([None, *FP8_TOKENS]),
    st.booleans(),
    st.booleans(),
)
def test_the_smallest_settings_fit_and_smaller_ones_do_not(
    tokens: int, cp: int, tp: int, budget: int, fp8: str | None, few: bool, dynamic: bool
) -> None:
    def align(size: int, budget: int = budget) -> Alignment:
        engine = Engine(tokens_per_microbatch_per_rank=budget, fp8=fp8, row_buckets=few)
        return alignment_of(Layout(tp=tp, sp=tp > 1, cp=size), size, engine)

    def fits(budget: int, cp: int) -> bool:
        sizes = cell_sizes(cp) if dynamic else [cp]
        return any(align(n, budget).row([tokens]) <= align(n, budget).room(budget * n) for n in sizes)

    needed, larger = smallest_fits(tokens, cp, budget, align, dynamic=dynamic)
    if few and fits(budget, cp):  # padded to a size of this budget
        assert needed <= budget
        return
    assert fits(needed, cp)
    assert needed == 1 or not fits(needed - 1, cp)
    if larger is None:
        assert not any(fits(budget, cp << n) for n in range(1, 14))
    elif not fits(budget, cp):
        assert larger > cp
        assert fits(budget, larger)
        assert not fits(budget, larger // 2)


# the model of time


def test_the_time_of_a_cell() -> None:
    costs = CellCosts(fixed=7.0, quadratic=0.5, exchange=(0.25, 1.0))
    assert costs.cell([3, 5], 1, alignment()) == 7 + 8 + 0.5 * (9 + 25)
    assert costs.cell([3, 5], 2, alignment(cp=2)) == 7 + (12 + 0.5 * (16 + 64) + 0.25 * 12) / 2
    assert costs.cell([8], 4, alignment(cp=4)) == 7 + (8 + 0.5 * 64 + 1.0 * 8 * 3) / 4
    assert costs.cell([16], 8, alignment(cp=8)) == 7 + (16 + 0.5 * 256 + 1.0 * 16 * 7) / 8
    assert costs.cell([], 2, alignment(cp=2)) == 7 + (4 + 0.25 * 4) / 2


def test_the_time_of_a_plan() -> None:
    """Ranks of a cell wait for each other, and so do neighbours that experts couple; a pipeline waits for its costliest."""
    lengths = [10, 20, 30, 40]
    table = [
        [Cell([0], range(1)), Cell([1], range(1, 2)), Cell([2], range(2, 3)), Cell([], range(3, 4))],
        [Cell([3], range(2)), Cell([], range(2, 4))],
    ]

    def timed(**how: Any) -> float:
        return plan_times(Plan(table, 4), lengths, CellCosts(0.0, exchange=(0.0,)), plain, **how)[0]

    assert timed() == 20 + 20
    assert timed(coupled=2) == max(20 + 20, 30 + 2)
    assert timed(coupled=4) == 30 + 20
    assert timed(coupled=3) == 30 + 20  # two groups that meet in a cell
    assert timed(fill=0.5) == 40 + 15


@pytest.mark.parametrize("coupled", [1, 8, 64])
@pytest.mark.parametrize(
    "kind", ["lognormal", "pareto", "cut off", "uniform", "uniform, a fourth of the budget"]
)
def test_planning_is_fast(kind: str, coupled: int) -> None:
    """Of 4,096 samples on 64 ranks; of even lengths up to eight ranks' budget it takes 340 rounds, and most packings fail."""
    part = 4 if "fourth" in kind else 1
    lengths = list(range(16, 131_072 // part, 32 // part))
    if "uniform" not in kind:
        lengths = long_tail(kind, 4096, 16384, 0)
        lengths[:20] = [60_000 + 1000 * n for n in range(20)]
    how: dict[str, Any] = {"costs": CellCosts(quadratic=1 / 60_000), "coupled": coupled, "alignment": plain}
    took = processor_s(lambda: plan_cells(lengths, dp=8, cp=8, budget=16384 // part, **how))
    assert took < 0.8  # 0.2 s are promised of a quiet machine


def test_static_plans_are_what_they_were() -> None:
    """Bit for bit, as they were before there were others."""
    rng, told = random.Random(7), hashlib.sha256()
    for _ in range(300):
        cp, dp = rng.choice([1, 2, 4, 8]), rng.randint(1, 8)
        lengths = [rng.randint(1, 200) for _ in range(rng.randint(0, 60))]
        plan = plan_microbatches(
            lengths,
            dp=dp,
            cp=cp,
            budget=rng.choice([216, 300, 512]),
            alignment=alignment(cp=cp),
            quadratic=rng.choice([0.0, 0.01]),
            multiple=rng.choice([1, 2, 4]),
            lockstep=rng.random() < 0.5,
        )
        told.update(repr([[(cell.samples, *cell.ranks) for cell in row] for row in plan.rounds]).encode())
    assert told.hexdigest()[:16] == "492308536848aa2e"
