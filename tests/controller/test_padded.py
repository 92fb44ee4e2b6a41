"""Steps with a critic, a reference policy and rollouts of either kind, on rows that are padded for FP8: what they tell without it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from quintet.cluster.cluster import Cluster
from quintet.cluster.verbs import StandIn
from quintet.controller import controller
from quintet.recipe import schema
from tests.controller.test_cells import model_dir  # noqa: F401  (a fixture)
from tests.controller.test_roles import recipe_of, two_steps

ROLLOUTS: dict[str, dict[str, Any]] = {
    "own": {},
    "own-processes": {"own_processes": True},
    "separate": {"own_processes": True, "placement": "separate", "ranks": 1},
}


def recipe(path: Path, fp8: str | None, rollout: str) -> schema.Recipe:
    """A critic, a reference policy, two mini-batches a step. fp8: of the engines of all three."""
    made = recipe_of(path, None)
    return made.model_copy(
        update={
            "engine": made.engine.model_copy(update={"fp8": fp8, "tokens_per_microbatch_per_rank": 160}),
            "rollout": made.rollout.model_copy(update=ROLLOUTS[rollout]),
        }
    )


WITHOUT: dict[str, list[float]] = {}
"""What is told without FP8, by rollout."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fp8", "rollout"),
    [
        pytest.param(*case, marks=[] if case == ("tensorwise", "own-processes") else pytest.mark.nightly)
        for case in itertools.product(["tensorwise", "blockwise"], ROLLOUTS)
    ],
)
def test_padding_changes_nothing_of_a_step(
    ray_cluster: Cluster,
    model_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fp8: str,
    rollout: str,
) -> None:
    def told(of_engines: str | None) -> list[float]:
        found, made = two_steps(ray_cluster, recipe(model_dir, of_engines, rollout))
        made.workers.close()
        return found

    if rollout not in WITHOUT:
        WITHOUT[rollout] = told(None)
    monkeypatch.setattr(controller, "Policy", StandIn("tests.controller.padded_workers:Padded"))
    assert told(fp8) == pytest.approx(WITHOUT[rollout], rel=1e-5, abs=1e-6)
