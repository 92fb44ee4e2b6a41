"""The oracle can fail: it finds each of `mistakes`, by the comparison that passes every layout without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle.cases import Case
from tests.oracle.compare import broken, errors
from tests.oracle.lora import written
from tests.oracle.mistakes import MISTAKES
from tests.oracle.pool import Pool, PoolError
from tests.oracle.ranks import train
from tests.oracle.reference import reference

OF_THE_FIRST_STEP = {"outputs", "loss", "gradients", "all", "norm", "copies", "ahead", "balance"}
"""Errors that need no second step: a mistake that has to show in these alone is given none."""


def kinds(pool: Pool, models: Path, case: Case, mistake: str | None, steps: int | None = None) -> set[str]:
    """Which errors break their bounds, after so many steps or all."""
    path, expected = written(case, models), reference(case)
    reports = pool.run(train, case.ranks, case, path, mistake, steps)
    found = errors(case, reports, replace(expected, steps=expected.steps[:steps]))
    return {text.partition(":")[0] for text in broken(case, found)}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_found(pool: Pool, models: Path, mistake: str) -> None:
    case, raises = MISTAKES[mistake].case, MISTAKES[mistake].raises
    if raises:
        with pytest.raises((PoolError, AssertionError), match=raises):
            kinds(pool, models, case, mistake)
        return
    shows = set(MISTAKES[mistake].shows)
    found = kinds(pool, models, case, mistake, 1 if shows <= OF_THE_FIRST_STEP else None)
    assert found >= shows, f"only {found} show it"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", sorted({m.case for m in MISTAKES.values()}, key=repr), ids=lambda case: case.name
)
def test_nothing_is_found_without_a_mistake(pool: Pool, models: Path, case: Case) -> None:
    """After the mistakes, in the same processes: they were taken back."""
    assert not kinds(pool, models, case, None)
