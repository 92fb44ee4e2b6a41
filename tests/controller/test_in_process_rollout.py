"""A rollout in the trainer's processes, in another layout: weights that it should not have are found, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import compare
from quintet.cli import main
from quintet.cluster.cluster import Cluster
from quintet.cluster.group import WorkerGroup
from quintet.controller.verbs import Policy
from tests.engine import moe_models
from tests.oracle.pool import Pool
from tests.train import planted

ROOT = Path(__file__).parents[2]
TINY = [
    *(
        "model.build.layers=2",
        "model.build.hidden_size=64",
        "sft=null",
        "train.eval_prompts=0",
        "train.steps=2",
    ),
    *("rollout.samples_per_prompt=2", "train.prompts_per_step=4", "optimizer.warmup_steps=0"),
]


@pytest.fixture(scope="module")
def told(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    path = moe_models.save("qwen3_moe", tmp_path_factory.getbasetemp() / "planted")
    return pool.run(planted.told, 2, path, planted.PLANTS)


@pytest.mark.parametrize("plant", planted.PLANTS)
def test_what_is_planted_is_named(told: list[Any], plant: str) -> None:
    shapes = {name: shape for rank in told for name, shape in rank[plant][2].items()}
    prints = [rank[plant][0] for rank in told]
    for rank in told:  # each has a whole copy
        found = [(one.name, one.kind) for one in compare(prints, [rank[plant][1]], shapes)]
        if plant == "nothing":
            assert found == []
        elif plant.startswith("swap"):
            assert found == [(name, "expert") for name in planted.EXPERTS]
        else:
            assert found == [(planted.TENSOR, "dense")]


@pytest.mark.slow
def test_a_flipped_element_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the second step's weights, after training on the first."""

    def group(cluster: Cluster, worker: Any, *args: Any, **how: Any) -> WorkerGroup:
        assert worker is Policy
        return WorkerGroup(cluster, planted.Flipping, *args, **how)

    monkeypatch.setattr(Cluster, "group", group)
    recipe = str(ROOT / "recipes" / "laptop_demo.yaml")
    assert main(["train", recipe, *TINY, "layout.tp=2", "rollout.layout.tp=1", f"run.dir={tmp_path}"]) == 5
    said = capsys.readouterr()
    assert said.err.startswith(
        "error: the rollout of dp rank 1 does not hold the trainer's weights after the sync: 1 tensor differs "
        f"(1 dense): {planted.TENSOR} (dense): other values"
    )
    assert "Nothing was generated with these weights." in said.err
    assert "Traceback" not in said.err
    assert "  1/2 " in said.out
