"""Engines as a run has them: reference models without training memory, and models of different layouts side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.oracle.cases import Case
from tests.oracle.compare import bounds, broken, errors, output_error
from tests.oracle.lora import written
from tests.oracle.pool import Pool
from tests.oracle.ranks import engine_of, evaluate_alone, train_together, train_watching_sends
from tests.oracle.reference import reference

FORWARD_ONLY = [
    Case("qwen3", dp=2),
    Case("qwen3", cp=2, cp_comm="all_to_all", pp=2),
    Case("qwen2", head="value", tp=2, sp=True, cp=2),
    Case("deepseek_v3", tp=2, sp=True, dp=2, ep=2, etp=2),
    pytest.param(Case("qwen3", tp=2, sp=True, pp=2, vpp=2), marks=pytest.mark.slow),
    pytest.param(Case("deepseek_v3", pp=2, vpp=2, dp=2, ep=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", FORWARD_ONLY, ids=lambda case: case.name)
def test_reference_models_hold_no_training_memory(pool: Pool, models: Path, case: Case) -> None:
    results = pool.run(evaluate_alone, case.ranks, case, written(case, models))
    assert [held for _, held in results] == [[]] * case.ranks
    error = output_error(case, [report for report, _ in results], reference(case))
    assert error.size <= bounds(case).outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "frozen"),
    [
        (
            [Case("qwen3", tp=2, sp=True, distributed_optimizer=True), Case("qwen3", head="value", pp=2)],
            Case("qwen3", dp=2),
        ),
        (
            [
                Case("deepseek_v3", tp=2, sp=True, cp=2, ep=2, etp=2, distributed_optimizer=True),
                Case("deepseek_v3", head="value", pp=2, vpp=2, dp=2, ep=2, recompute="full"),
            ],
            Case("deepseek_v3", dp=2, cp=2, cp_comm="all_to_all", ep=4),
        ),
    ],
    ids=["dense", "experts"],
)
def test_layouts_live_side_by_side(pool: Pool, models: Path, trained: list[Case], frozen: Case) -> None:
    """Actor, critic and reference in one process, each in its own layout: each says what transformers says."""
    paths = [written(case, models) for case in trained]
    ranks = pool.run(train_together, frozen.ranks, trained, paths, frozen, written(frozen, models))
    for i, case in enumerate(trained):
        assert not broken(case, errors(case, [reports[i] for reports in ranks], reference(case)))
    for i in (-2, -1):  # before and after the others were trained
        error = output_error(frozen, [reports[i] for reports in ranks], reference(frozen))
        assert error.size <= bounds(frozen).outputs


def test_what_is_being_sent_keeps_its_data(pool: Pool, models: Path) -> None:
    """Interleaved stages send while they compute on, and free an output as soon as its send has begun."""
    case = Case("qwen3", pp=2, vpp=2)
    results = pool.run(train_watching_sends, case.ranks, case, written(case, models))
    assert all(sends for _, sends in results)
    assert not broken(case, errors(case, [report for report, _ in results], reference(case)))


def waits_of_groups() -> set[float]:
    """After how many seconds a collective of any group of a layout is given up."""
    from quintet.engine.mesh import Sizes, build_mesh

    mesh = build_mesh(Sizes(tp=2, cp=2, ep=2, dynamic_cp=True))
    groups = [*vars(mesh.groups).values(), *mesh.cp_groups.values()]
    timeouts = [one._get_backend(torch.device("cpu")).options._timeout for one in groups if one is not None]
    return {one.total_seconds() for one in timeouts}


def used_groups(path: Path) -> tuple[list[int], list[str], str]:
    """Sizes of the groups that this rank communicates in while its engine is made, and of those that a row may be shared in; what the
    engine says of them."""
    from quintet.engine import build
    from quintet.recipe import schema

    used: list[Any] = []
    real = torch.distributed.all_reduce

    def noted(tensor: Any, *args: Any, **how: Any) -> Any:
        used.append(how.get("group"))
        return real(tensor, *args, **how)

    case = Case("qwen3", cp=4, mixed=True)
    with (
        mock.patch.object(torch.distributed, "all_reduce", noted),
        mock.patch.object(build, "_free_bytes", side_effect=iter([5 << 20, 2 << 20])),
    ):
        engine = engine_of(case, path, engine=schema.Engine(distributed_optimizer=False))
    there = [group for group in engine.mesh.cp_groups.values() if group is not None]
    assert engine._groups_bytes == 3 << 20
    return (
        [group.size() for group in there if group in used],
        [str(g.size()) for g in there],
        engine.describe(),
    )


@pytest.mark.slow
def test_every_group_is_used_once_when_the_engine_is_made(pool: Pool, models: Path) -> None:
    """Else NCCL would make its communicator in the middle of a backward pass; and what that took is told."""
    for used, there, said in pool.run(used_groups, 4, written(Case("qwen3"), models)):
        assert used == [2, 4]
        assert f"groups of {', '.join(there)} ranks for a row" in said


@pytest.mark.slow
def test_groups_wait_as_long_as_the_default_group(pool: Pool) -> None:
    """The pool's is made with five minutes; torch gives other groups half an hour."""
    assert pool.run(waits_of_groups, 4) == [{300.0}] * 4
