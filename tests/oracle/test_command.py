"""`python -m tests.oracle`: which cases it takes, what it prints and writes, and that it fails where a bound breaks."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.records import read_records, write_records
from tests.oracle import __main__ as command
from tests.oracle.cases import THOROUGH, Case
from tests.oracle.compare import Error
from tests.oracle.pool import Pool


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_cases_fit_the_gpus(gpus: int) -> None:
    cases = command.chosen(gpus, "all", "")
    assert max(case.ranks for case in cases) == gpus
    for backend in ("portable", "transformer_engine"):
        mine = command.chosen(gpus, backend, "")
        assert {case.backend for case in mine} == {backend}
        assert {case.dtype for case in mine} == {"fp32", "bf16"}
        assert any(case.cpu_optimizer for case in mine)
    assert {case.family for case in command.chosen(gpus, "all", "|".join(THOROUGH))} >= set(THOROUGH)


@pytest.mark.nightly
def test_runs_on_the_cpu(pool: Pool, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(c.backend == "portable" and not c.cpu_optimizer for c in command.chosen(0, "all", ""))
    cases = command.chosen(0, "portable", r"^qwen3$|^qwen3-bf16$")
    found, failed = command.run(cases, pool, models)
    assert set(found) == set(cases)
    assert len(cases) == 2
    assert not failed
    assert "1/2 ok 1 ranks" in capsys.readouterr().out


@pytest.mark.slow
def test_what_fails_is_told(pool: Pool, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "broken", lambda case, found: ["loss: 1.0e+00 at step 1, bound 1e-05"])
    found, failed = command.run([Case("qwen3")], pool, models)
    assert failed == ["qwen3: loss: 1.0e+00 at step 1, bound 1e-05"]
    assert found


def test_summary_keeps_the_worst(tmp_path: Path) -> None:
    found = {
        Case("qwen3"): {"loss": Error(1e-7, "step 1")},
        Case("qwen3", tp=2): {"loss": Error(3e-7, "step 1")},
        Case("qwen3", dtype="bf16"): {"loss": Error(1e-3, "step 1")},
    }
    groups = command.summary(found)
    assert groups["qwen3/portable/fp32"]["loss"] == Error(3e-7, "qwen3-tp2: step 1")
    counts = {"qwen3/portable/fp32": 2, "qwen3/portable/bf16": 1}
    assert "qwen3/portable/fp32  2      3.0e-07" in command.table(groups, counts)
    options = argparse.Namespace(gpus=4, backend="all", k="qwen3$")
    write_records(tmp_path / "o.json", command.records(groups, counts, 1, options))
    records = {(r["case"], r["metric"]): r for r in read_records(tmp_path / "o.json")}
    assert records["all", "failed"]["value"] == 1.0
    assert records["qwen3/portable/fp32", "worst_loss"]["value"] == 3e-7
    assert records["all", "failed"]["command"] == "python -m tests.oracle --gpus 4 --backend all -k 'qwen3$'"
