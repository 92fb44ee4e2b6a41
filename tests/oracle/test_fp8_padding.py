"""Rows padded as FP8 needs them, computed without FP8: no real token's output, loss, gradient or step is another for it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from quintet.packing import FP8_TOKENS
from tests.oracle import ranks
from tests.oracle.cases import Case
from tests.oracle.compare import broken, errors
from tests.oracle.lora import written
from tests.oracle.pool import Pool, PoolError
from tests.oracle.reference import reference

CASES = [
    (Case("qwen3", tp=2, sp=True, pp=2, vpp=2, distributed_optimizer=True), "tensorwise"),
    (Case("qwen3", head="value", cp=2, tp=2, sp=True), "blockwise"),
    (Case("qwen3_moe", replay="rollout", dp=2, ep=2, aux_loss="sequence", z_loss=True), "blockwise"),
    (Case("qwen3_moe", replay="old", tp=2, sp=True, cp=2, ep=2, etp=1, mixed=True), "tensorwise"),
    (Case("mimo", mtp=2, tp=2, sp=True, cp=2, mixed=True), "tensorwise"),
    (Case("deepseek_v3", mtp=2, pp=2, vpp=2, dp=2, ep=2, recompute="selective"), "blockwise"),
    (Case("deepseek_v3", dp=2, ep=2, expert_bias=True, aux_loss="batch", recompute="full"), "tensorwise"),
]
ROOM = 24
"""Tokens of a row besides one multiple: the longest sample has as many."""


def budget(case: Case, fp8: str) -> int:
    """A micro-batch's tokens on a rank, no whole number of multiples."""
    return FP8_TOKENS[fp8] * (case.tp if case.sp else 1) + ROOM


def train_padded(case: Case, path: Path, fp8: str, unaware: str = "") -> ranks.Report:
    """As `ranks.train`, the engine told of FP8 and its layers not. unaware: who aligns without it, "plan" or "row", planted."""
    import quintet.engine.pipeline
    from quintet.engine import fp8 as arithmetic

    real = quintet.engine.pipeline.alignment_of
    modules = {"plan": ranks, "row": quintet.engine.pipeline}
    recipe = case.recipe(path).engine.model_copy(
        update={"fp8": fp8, "tokens_per_microbatch_per_rank": budget(case, fp8)}
    )

    def without(layout: Any, cp: int, fp8: str | None) -> Any:
        return real(layout, cp, None)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(arithmetic, "require"))
        patches.enter_context(mock.patch.object(arithmetic, "fields", return_value={}))
        if unaware:
            patches.enter_context(mock.patch.object(modules[unaware], "alignment_of", without))
        training = ranks.Training(case, path, engine=recipe)
        for batch in case.batches:
            training.step(batch)
        return training.finish()


@pytest.mark.parametrize(("case", "fp8"), CASES, ids=lambda one: getattr(one, "name", one))
def test_padding_changes_nothing(pool: Pool, models: Path, case: Case, fp8: str) -> None:
    reports = pool.run(train_padded, case.ranks, case, written(case, models), fp8)
    assert not broken(case, errors(case, reports, reference(case)))


@pytest.mark.parametrize(
    ("unaware", "said"),
    [
        ("plan", "by another alignment than that of engine.fp8=tensorwise"),
        ("row", "no multiple of 16, which engine.fp8=tensorwise needs"),
    ],
)
def test_a_caller_that_aligns_without_fp8_is_named(pool: Pool, models: Path, unaware: str, said: str) -> None:
    case = Case("qwen3", tp=2, sp=True)
    with pytest.raises(PoolError, match=said):
        pool.run(train_padded, case.ranks, case, written(case, models), "tensorwise", unaware)
