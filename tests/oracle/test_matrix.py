"""Every pair of the engine's features is run or refused, and the page that says so is what the suite says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.oracle.matrix import PAGE, STEP, TITLES, Cell, beside_the_loop, gaps, matrix, page


@pytest.fixture(scope="module")
def cells() -> dict[frozenset[str], Cell]:
    return matrix()


def test_every_pair_is_run_or_refused(cells: dict[frozenset[str], Cell]) -> None:
    assert not gaps(cells), (
        "add a case to tests/oracle/cases.py, or refuse the pair in quintet/recipe/refused.py"
    )
    assert len(cells) == len(TITLES) * (len(TITLES) - 1) // 2


def test_eight_bits_are_run_or_refused_beside_the_loop() -> None:
    loop = beside_the_loop()
    assert not gaps(loop), "add a case to tests/controller/test_padded.py, or refuse the pair"
    refused = {pair for pair, cell in loop.items() if cell.where == "refused"}
    assert refused == {
        frozenset(("fp8_tensorwise", "shared_rollout")),
        frozenset(("fp8_blockwise", "shared_rollout")),
        frozenset(("fp8_tensorwise", "fp8_rollout")),
    }


def test_the_step_in_8_bits_is_on_record() -> None:
    records = Path(__file__).parents[2] / "benchmarks" / "results" / "step.json"
    assert any(row["command"].startswith(STEP) for row in json.loads(records.read_text(encoding="utf-8")))


def test_a_gap_is_seen(cells: dict[frozenset[str], Cell]) -> None:
    assert gaps(cells | {frozenset(("tp", "pp")): Cell("", "")}) == ["pp × tp"]


def test_page_is_up_to_date(cells: dict[frozenset[str], Cell]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(cells, beside_the_loop()), (
        "run: python -m tests.oracle.matrix"
    )
