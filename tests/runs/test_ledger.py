"""The ledger: exact, flat, flushed, and readable when cut off."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.errors import UserError
from quintet.runs.ledger import Ledger, read_metrics


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.floats(), max_size=5))
def test_every_number_reads_back_bit_by_bit(tmp_path_factory: pytest.TempPathFactory, metrics: dict) -> None:
    metrics.pop("stage", None)
    metrics.pop("step", None)
    path = tmp_path_factory.mktemp("ledger") / "metrics.jsonl"
    ledger = Ledger(path)
    ledger.write("rl", 1, metrics)
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["stage"] == "rl"
    (read,) = read_metrics(path)
    for key, value in metrics.items():
        same = read[key] == value or (
            isinstance(value, float) and math.isnan(value) and math.isnan(read[key])
        )
        assert same
    ledger.close()


def test_a_line_is_on_disk_when_write_returns_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    ledger = Ledger(path)
    ledger.write("rl", 1, {"loss": 0.5})
    ledger.write("rl", 2, {"loss": 0.25})
    text = path.read_text()
    assert len(text.splitlines()) == 2
    path.write_text(text[:-7])
    assert read_metrics(path) == [{"stage": "rl", "step": 1, "loss": 0.5}]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_tensors_become_numbers_and_text_is_refused(tmp_path: Path) -> None:
    import torch

    ledger = Ledger(tmp_path / "m.jsonl")
    ledger.write("rl", 1, {"loss": torch.tensor(0.5), "flag": True})
    assert read_metrics(tmp_path / "m.jsonl") == [{"stage": "rl", "step": 1, "loss": 0.5, "flag": 1}]
    with pytest.raises(TypeError, match="metric loss must be a number"):
        ledger.write("rl", 2, {"loss": "high"})


def test_a_full_disk_is_told_once() -> None:
    """/dev/full refuses every write with ENOSPC."""
    ledger = Ledger(Path("/dev/full"))
    with pytest.raises(UserError, match="/dev/full cannot be written: No space left on device"):
        ledger.write("rl", 1, {"loss": 1.0})
    ledger.close()
