"""Where rollouts run, resolved from a recipe."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.recipe.rollout import placement_of
from quintet.recipe.schema import Cluster, Layout, Lora, Recipe, Rollout, RolloutLayout

TP2 = RolloutLayout(tp=2)
LORA = Lora(rank=4)


@pytest.mark.parametrize(
    ("training", "lora", "rollout", "found"),
    [
        ({}, None, {}, {"own_processes": False, "shares_weights": True, "copies": 4}),
        ({"tp": 2}, None, {}, {"shares_weights": True, "layout": TP2, "copies": 2}),
        ({"tp": 2}, None, {"layout": TP2}, {"shares_weights": True, "copies": 2}),
        ({}, None, {"layout": TP2}, {"own_processes": False, "shares_weights": False, "copies": 2}),
        ({"tp": 2, "cp": 2}, None, {"layout": TP2}, {"shares_weights": False}),
        ({}, None, {"own_processes": True}, {"own_processes": True, "shares_weights": False, "copies": 4}),
        ({"tp": 2}, None, {"own_processes": True}, {"layout": RolloutLayout(), "copies": 4}),
        ({}, None, {"own_processes": True, "layout": TP2}, {"ranks_per_copy": 2, "devices_per_copy": 2}),
        ({}, None, {"backend": "vllm", "layout": TP2}, {"own_processes": True, "ranks_per_copy": 1, "copies": 2}),
        ({}, None, {"placement": "separate", "ranks": 6, "layout": TP2}, {"separate": True, "copies": 3}),
        ({}, LORA, {}, {"adapters_separate": True, "adapters_scaled": False, "sleep_level": 1}),
        ({}, LORA, {"backend": "vllm"}, {"adapters_separate": False, "sleep_level": 2}),
        ({}, LORA, {"backend": "vllm", "adapter_sync": "separate"}, {"adapters_scaled": True, "sleep_level": 1}),
        ({}, None, {"sleep_level": 1}, {"adapters_separate": False, "sleep_level": 1}),
    ],
)  # fmt: skip
def test_a_recipe_is_placed(
    training: dict[str, int], lora: Lora | None, rollout: dict[str, Any], found: dict[str, Any]
) -> None:
    recipe = Recipe(
        cluster=Cluster(ranks=4), layout=Layout(**training), lora=lora, rollout=Rollout(**rollout)
    )
    placement = placement_of(recipe)
    assert {name: getattr(placement, name) for name in found} == found
