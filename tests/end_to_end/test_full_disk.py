"""A run whose disk is full for some steps: with checkpoint.on_error=continue it goes on, and records again when there is room."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet.runs.ledger import read_metrics
from tests.disks import fill, mounted
from tests.end_to_end.test_resume import SMALL, only, start

STEPS = 24
TALKATIVE = """\
def score(prompt, response, answer):
    print("x" * 5000)
    return float(len(response))
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "24m") as disk:
        yield disk


def until(process: subprocess.Popen[str], words: str) -> str:
    """What is said until a line with these words comes."""
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if re.search(words, line):
            return said
    raise AssertionError(said)


@pytest.mark.slow
def test_steps_are_taken_while_nothing_can_be_written(tmp_path: Path, disk: Path) -> None:
    (tmp_path / "reward.py").write_text(TALKATIVE)
    process = start(
        *("train", *SMALL, "sft=null", "algorithm.kl_coef=0", f"run.dir={disk}", f"train.steps={STEPS}"),
        *(f"reward.function={tmp_path / 'reward.py'}:score", "run.trackers=[tensorboard]"),
        *("checkpoint.every_steps=4", "checkpoint.on_error=continue"),
    )
    said = until(process, rf"^ +3/{STEPS} ")
    filler = fill(disk)
    said += until(process, "^warning: .* cannot be written: No space left on device") + until(
        process, rf"^ +12/{STEPS} "
    )
    filler.unlink()
    said += until(process, "^the disk takes records again; left out were ")
    said += process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    assert len(re.findall("^warning: .* cannot be written", said, re.MULTILINE)) == 1
    run = only(disk)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["failed_saves"] > 0, summary["records_left_out"] > 0) == (
        "finished",
        True,
        True,
    )
    recorded = {line["step"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line}
    assert {1, 2, 3, STEPS - 1, STEPS} <= recorded < set(range(1, STEPS + 1))
    assert any("the disk was full: " in log.read_text() for log in (run / "logs").glob("*.log"))
    assert (run / "checkpoints" / f"step-{STEPS:06d}" / "manifest.json").exists()
