"""A rank that leaves out a part of a round: the others wait, and the error names round, ranks and where each is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quintet.cluster.cluster import Cluster
from quintet.cluster.group import WorkerGroup
from quintet.errors import WorkerFailure
from quintet.packing.plan import RankCell
from quintet.recipe.schema import Cluster as ClusterSettings
from tests.controller.round_workers import Training
from tests.oracle.cases import Case
from tests.oracle.lora import written
from tests.patience import BUSY

pytestmark = pytest.mark.slow

TIMEOUT_S = 3.0 * BUSY


def hang(
    path: Path, case: Case, cells: list[list[RankCell]], lengths: list[int], **how: Any
) -> WorkerFailure:
    """What is told of two ranks that wait for each other in vain, on cells that they both finish where they make no mistake."""
    settings = ClusterSettings(ranks=2, device="cpu", collective_timeout_s=TIMEOUT_S)
    with (
        Cluster(settings) as cluster,
        WorkerGroup(cluster, Training, 2, case=case, path=written(case, path)) as group,
        pytest.raises(WorkerFailure) as caught,
    ):
        group.all(Training.train, phase="train")(cells, lengths, **how)
    error = caught.value
    assert error.message.startswith(f"A collective waited longer than {TIMEOUT_S:g} s")
    return error


def test_a_rank_that_is_a_round_short_is_named(ray_cluster: Cluster, tmp_path: Path) -> None:
    cells = [[RankCell([0]), RankCell([2], 2, 0)], [RankCell([1])]]
    error = hang(tmp_path, Case("qwen3", cp=2, mixed=True), cells, [8, 6, 12])
    assert error.message.endswith(
        "\nAt micro-batch 2 of 2, shared by the ranks [0, 1]: rank 0.\nAt micro-batch 1 of 1: rank 1."
    )
    assert "context_parallel.py" in error.stacks[0]
    assert "context_parallel.py" not in error.stacks[1]


def test_a_dummy_that_is_left_out_of_layers_with_experts_is_named(
    ray_cluster: Cluster, tmp_path: Path
) -> None:
    cells = [[RankCell([0]), RankCell([2])], [RankCell([1]), RankCell([])]]
    error = hang(tmp_path, Case("qwen3_moe", cp=2, ep=2, mixed=True), cells, [8, 6, 12], skips_dummies=True)
    assert error.message.endswith("\nAt micro-batch 2 of 2: ranks 0, 1.")
    assert "dispatch.py" in error.stacks[0]
    assert "dispatch.py" not in error.stacks[1]
