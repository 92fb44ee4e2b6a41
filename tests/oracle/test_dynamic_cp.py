"""Every way to cut a block of ranks after every other: what one rank computes, whatever the order of the groups."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from quintet.packing.align import alignment_of
from quintet.packing.plan import Cell, Plan, RankCell, rank_cells
from tests.oracle.cases import Case
from tests.oracle.compare import assemble, relative
from tests.oracle.data import TEMPERATURE, VOCAB, loss_mask
from tests.oracle.lora import written
from tests.oracle.pool import Pool, PoolError
from tests.oracle.ranks import Objective, Piece, cuts, engine_of, gather_gradients, pieces

ONE_LONG = [[3, 24, 5], [7, 7, 7, 7, 7], [11], [4, 3, 17, 6]]


def every_pair(count: int) -> list[int]:
    """Numbers under `count`, in which each stands once after each, itself included: a de Bruijn sequence, closed."""
    walk = [
        n
        for first in range(count)
        for n in [first, *itertools.chain(*((first, m) for m in range(first + 1, count)))]
    ]
    return [*walk, walk[0]]


def test_every_pair_stands_once() -> None:
    for count in (1, 2, 5, 7):
        assert sorted(itertools.pairwise(every_pair(count))) == list(
            itertools.product(range(count), repeat=2)
        )
    assert sorted(map(tuple, cuts(4))) == [(1, 1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 2), (4,)]
    assert len(cuts(8)) == 26


def plan_of(ways: list[list[list[int]]], lengths: list[int], block: int) -> Plan:
    """Of each block and round the sizes of groups, and samples dealt over these cells; the last cells have none."""
    rng, rounds = random.Random(3), []
    for of_blocks in zip(*ways, strict=True):
        begin, cells = 0, []
        for size in itertools.chain(*of_blocks):
            cells.append(Cell([], range(begin, begin + size)))
            begin += size
        rounds.append(cells)
    cells = [cell for row in rounds for cell in row]
    for sample in range(len(lengths)):
        rng.choice(cells).samples.append(sample)
    return Plan(rounds, block)


def random_plan(case: Case, lengths: list[int], rounds: int) -> Plan:
    """Rounds of random cuts, or with 0 of every one after every other."""
    all_ways, rng = cuts(case.cp), random.Random(case.cp)
    walk = every_pair(len(all_ways))
    ways = [
        [all_ways[n] for n in walk] if not rounds else [rng.choice(all_ways) for _ in range(rounds)]
        for _ in range(case.dp)
    ]
    return plan_of(ways, lengths, case.cp)


def told(
    case: Case, path: Path, lengths: list[int], plan: Plan | None
) -> tuple[float, list[Piece], dict[int, Any]]:
    """Of this rank its share of the loss, its gradients, and the log-probs of the samples it tells of. plan: None for all samples one
    by one."""
    from quintet.data.batch import make_batch, offsets, select

    # Cells are forced, whatever budget a planner would have kept.
    room = case.recipe(path).engine.model_copy(update={"tokens_per_microbatch_per_rank": sum(lengths) * 8})
    engine = engine_of(case, path, engine=room)
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    whole = make_batch(ids, [1] * len(ids), loss_mask=[loss_mask(n) for n in lengths])
    mesh = engine.mesh
    if plan is None:
        samples, cells = list(range(len(ids))), [RankCell([i]) for i in range(len(ids))]
    else:
        samples, cells = plan.samples_of(mesh.at("dp")), rank_cells(plan.local(mesh.at("dp")), mesh.at("cp"))
    if case.vpp > 1:  # as a plan has them
        cells += [RankCell([])] * (-len(cells) % case.pp)
    mine = select(whole, samples)
    objective = Objective("lm", int(sum(map(sum, map(loss_mask, lengths)))))
    for (micro, _), cell in zip(engine._pipeline.rows(mine, cells), cells, strict=True):
        sizes = [lengths[samples[i]] for i in cell.samples]
        want = alignment_of(engine.layout, cell.cp, engine.recipe).row(sizes) // cell.cp
        assert micro.tokens == want, f"{micro.tokens} tokens on a rank, where the plan has {want}"
    turns: list[str] = []
    engine.tell_turns(turns.append)
    outputs = engine.forward(mine, cells, TEMPERATURE)
    assert turns == [*(turn(engine.mesh, k, len(cells), cell) for k, cell in enumerate(cells, 1)), ""]
    result = engine.forward_backward(mine, cells, objective, TEMPERATURE)
    if case.distributed_optimizer:
        gather_gradients(engine)
    tells = result is not None and mesh.at("tp") == 0
    ends, known = offsets(mine).tolist(), {}
    for i in (i for cell in cells if outputs is not None for i in cell.samples):
        known[samples[i]] = outputs.logprobs[ends[i] : ends[i + 1]].clone()
    return (result.loss if tells else 0.0), pieces(engine, "main_grad"), known


def turn(mesh: Any, number: int, total: int, cell: RankCell) -> str:
    """What this rank says it is at when a hang is told."""
    first = mesh.rank - cell.place * mesh.sizes.tp
    shared = list(range(first, first + cell.cp * mesh.sizes.tp, mesh.sizes.tp))
    return f"micro-batch {number} of {total}" + (f", shared by the ranks {shared}" if cell.cp > 1 else "")


def check(pool: Pool, models: Path, case: Case, lengths: list[int], plan: Plan, run: Any = told) -> None:
    path = written(case, models)
    ((loss, of_one, outputs),) = pool.run(told, 1, Case(case.family), path, lengths, None)
    want, _ = assemble([of_one])
    found = pool.run(run, case.ranks, case, path, lengths, plan)
    assert sum(share for share, _, _ in found) == pytest.approx(loss, rel=1e-5)
    gradients, copies = assemble(of_rank for _, of_rank, _ in found)
    assert copies.size == 0
    for name, gradient in want.items():
        assert relative(gradients[name], gradient) < 1e-5, name
    seen = set()
    for _, _, known in found:
        for i, logprobs in known.items():
            torch.testing.assert_close(logprobs, outputs[i], rtol=1e-5, atol=1e-5)
            seen.add(i)
    assert seen == set(range(len(lengths)))


LENGTHS = [1 + (7 * n) % 23 for n in range(50)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3", cp=4, mixed=True),
        Case("qwen3_moe", cp=4, ep=2, cp_comm="all_to_all", recompute="full", mixed=True),
    ],
    ids=lambda case: case.name,
)
def test_every_cut_after_every_other(pool: Pool, models: Path, case: Case) -> None:
    check(pool, models, case, LENGTHS, random_plan(case, LENGTHS, 0))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3", pp=2, cp=4, mixed=True),
        # With two ranks there is one group: backward by that of another row could not show.
        Case("qwen3", pp=2, cp=4, cp_comm="all_to_all", mixed=True),
        Case("deepseek_v3", pp=2, cp=4, ep=4, recompute="selective", mixed=True),
        Case("qwen3", pp=2, vpp=2, cp=2, dp=2, mixed=True),
    ],
    ids=lambda case: case.name,
)
def test_every_cut_after_every_other_in_a_pipeline(pool: Pool, models: Path, case: Case) -> None:
    check(pool, models, case, LENGTHS, random_plan(case, LENGTHS, 0))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ONE_LONG, ids=str)
def test_few_samples_of_any_length(pool: Pool, models: Path, lengths: list[int]) -> None:
    """Fewer than ranks, one alone, equal ones, one long: in rounds of random cuts, most of whose cells are empty."""
    case = Case("qwen3", cp=4, mixed=True)
    check(pool, models, case, lengths, random_plan(case, lengths, 4))


def told_over_the_mesh(*args: Any) -> Any:
    """As `told`, with keys and values from all ranks of the block, here all there are."""
    import quintet.engine.engine  # noqa: F401  (adapts megatron-core)
    from quintet.engine.layers.context_parallel import AllGather

    real = AllGather.before

    def before(exchange: Any, *of: Any) -> Any:
        return real(replace(exchange, group=torch.distributed.group.WORLD), *of)

    with mock.patch.object(AllGather, "before", before):
        return told(*args)


def test_an_exchange_over_the_group_of_the_mesh_is_seen(pool: Pool, models: Path) -> None:
    """Side by side two cells of two ranks, which come to it with as many tokens: else ranks would wait, or gloo refuse."""
    case, lengths = Case("qwen3", cp=4, mixed=True), [12] * 4
    plan = Plan([[Cell([k], range(2)), Cell([k + 1], range(2, 4))] for k in (0, 2)], 4)
    check(pool, models, case, lengths, plan)
    with pytest.raises(AssertionError, match="comparison failed"):
        check(pool, models, case, lengths, plan, told_over_the_mesh)


def told_aligned_as_the_largest(*args: Any) -> Any:
    """As `told`, with every row padded as one of all ranks of a block."""
    from quintet.engine import pipeline

    real = pipeline.alignment_of
    with mock.patch.object(pipeline, "alignment_of", lambda layout, cp, fp8: real(layout, layout.cp, fp8)):
        return told(*args)


def test_padding_of_the_largest_cell_is_seen(pool: Pool, models: Path) -> None:
    """Nothing is wrong then but the budget, which a plan keeps by each cell's own alignment."""
    case, lengths = Case("qwen3", cp=4, mixed=True), [5] * 4
    plan = Plan([[Cell([k], range(k, k + 1)) for k in range(4)]], 4)
    with pytest.raises(PoolError, match="8 tokens on a rank, where the plan has 5"):
        check(pool, models, case, lengths, plan, told_aligned_as_the_largest)
