"""The first steps of two runs are what they were: bit by bit on one machine, to 1e-5 against what is written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.cluster.cluster import Cluster
from tests.golden.runs import CASES, STEPS, WRITTEN, lines_of, written


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_first_steps(ray_cluster: Cluster, case: str, tmp_path: Path) -> None:
    """Where a change is meant to change them: python -m tests.golden."""
    lines = lines_of(case, tmp_path)
    assert lines_of(case, tmp_path) == lines
    golden = written(case)
    assert len(lines) == len(golden) == 2 * STEPS  # of the warm-up and of RL
    for line, before in zip(lines, golden, strict=True):
        assert (line["stage"], line["step"]) == (before["stage"], before["step"])
        for key in set(WRITTEN) & before.keys():
            assert line[key] == pytest.approx(before[key], rel=1e-5, abs=1e-5), (
                line["stage"],
                line["step"],
                key,
            )
