"""Rows padded as FP8 needs them, computed without FP8: no real token's output, loss, gradient or step is another for it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.oracle import ranks
from tests.oracle.cases import PADDED_LAYOUTS, Case
from tests.oracle.compare import broken, errors
from tests.oracle.lora import written
from tests.oracle.pool import Pool, PoolError
from tests.oracle.reference import reference


def train_padded(case: Case, path: Path, unaware: str = "") -> ranks.Report:
    """As `ranks.train`, the engine told of FP8 and its layers not. unaware: who aligns without it, "plan" or "row", planted."""
    import quintet.engine.pipeline
    from quintet.engine import fp8 as arithmetic

    real = quintet.engine.pipeline.alignment_of
    modules = {"plan": ranks, "row": quintet.engine.pipeline}

    def without(layout: Any, cp: int, engine: Any) -> Any:
        return real(layout, cp, None)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(arithmetic, "require"))
        patches.enter_context(mock.patch.object(arithmetic, "fields", return_value={}))
        patches.enter_context(mock.patch("quintet.packing.align.ROW_WASTE", ranks.ROW_WASTE))
        if unaware:
            patches.enter_context(mock.patch.object(modules[unaware], "alignment_of", without))
        training = ranks.Training(case, path)
        for batch in case.batches:
            training.step(batch)
        return training.finish()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case.fp8 == "blockwise" else ())
        for case in PADDED_LAYOUTS
    ],
    ids=lambda case: case.name,
)
def test_padding_changes_nothing(pool: Pool, models: Path, case: Case) -> None:
    reports = pool.run(train_padded, case.ranks, case, written(case, models))
    assert not broken(case, errors(case, reports, reference(case)))


@pytest.mark.parametrize(
    ("unaware", "said"),
    [
        ("plan", "by another alignment than that of engine.fp8=tensorwise"),
        ("row", "no multiple of 16, which engine.fp8=tensorwise needs"),
    ],
)
def test_a_caller_that_aligns_without_fp8_is_named(pool: Pool, models: Path, unaware: str, said: str) -> None:
    case = Case("qwen3", tp=2, sp=True, fp8="tensorwise")
    with pytest.raises(PoolError, match=said):
        pool.run(train_padded, case.ranks, case, written(case, models), unaware)
