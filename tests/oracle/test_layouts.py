"""Every layout computes what one transformers process computes: see `cases` for which, `compare` for how closely."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.cases import Case, fast_cases, nightly_cases, slow_cases
from tests.oracle.compare import broken, errors
from tests.oracle.lora import written
from tests.oracle.pool import Pool
from tests.oracle.ranks import Report, Training, train
from tests.oracle.reference import reference


def check(pool: Pool, models: Path, case: Case) -> None:
    path = written(case, models)
    reports = pool.run(train, case.ranks, case, path)
    assert not broken(case, errors(case, reports, reference(case)))


@pytest.mark.parametrize("case", fast_cases(), ids=lambda case: case.name)
def test_layout_equals_transformers(pool: Pool, models: Path, case: Case) -> None:
    check(pool, models, case)


MIXED = [
    Case("qwen3", cp=2, mixed=True),
    Case("qwen3", cp=2, dp=2, distributed_optimizer=True, mixed=True),
    Case("qwen3", cp=2, tp=2, sp=True, cp_comm="all_to_all", mixed=True),
    Case("qwen3", cp=4, recompute="full", mixed=True),
    Case("deepseek_v3", cp=2, pp=2, vpp=2, recompute="selective", mixed=True),
    Case("qwen3_moe", cp=2, dp=2, ep=4, mixed=True),
    Case("qwen3", head="value", cp=2, tp=2, sp=True, mixed=True),
]


@pytest.mark.parametrize("case", MIXED, ids=lambda case: case.name)
def test_cells_of_one_rank_beside_cells_of_all(pool: Pool, models: Path, case: Case) -> None:
    """The plan alone says who shares a row: nothing is read off layout.cp."""
    check(pool, models, case)


LARGER = [
    Case("mimo", mtp=2, pp=2, cp=2, mtp_detach=False),
    Case("deepseek_v3", mtp=2, dp=2, ep=2, replay="rollout"),
    Case("qwen3_moe", tp=2, sp=True, etp=2, replay="old", optimizer="sgd"),
]


def train_in_larger_rows(case: Case, path: Path) -> Report:
    """As `train`, in micro-batches of four times as many tokens."""
    engine = case.recipe(path).engine
    larger = {"tokens_per_microbatch_per_rank": 4 * engine.tokens_per_microbatch_per_rank}
    training = Training(case, path, engine=engine.model_copy(update=larger))
    for batch in case.batches:
        training.step(batch)
    return training.finish()


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGER, ids=lambda case: case.name)
def test_other_micro_batches_equal_transformers(pool: Pool, models: Path, case: Case) -> None:
    """Of what is counted and told by token: targets ahead, and routes."""
    reports = pool.run(train_in_larger_rows, case.ranks, case, written(case, models))
    assert not broken(case, errors(case, reports, reference(case)))


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_cases(), ids=lambda case: case.name)
def test_more_layouts_equal_transformers(pool: Pool, models: Path, case: Case) -> None:
    check(pool, models, case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", nightly_cases(), ids=lambda case: case.name)
def test_every_pair_on_eight_ranks_equals_transformers(pool: Pool, models: Path, case: Case) -> None:
    check(pool, models, case)
