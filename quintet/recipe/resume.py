"""What a resumed run may change of its recipe.

A run is its model, data, seed, algorithm, reward, optimizer and sampling: with other ones it is another run. How and where it
is computed, how long it goes on, how often it is looked at and saved may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quintet.recipe.keys import leaf_keys
from quintet.recipe.schema import Recipe

MAY_CHANGE = (
    "resume",
    "checkpoint",
    "run.name",  # the run directory keeps its own
    "run.dir",
    "run.trackers",
    "run.samples_logged_per_step",
    "cluster",
    "layout",
    "reference.layout",
    "critic.layout",
    "engine",
    "rollout.backend",
    "rollout.mode",
    "rollout.placement",
    "rollout.ranks",
    "rollout.own_processes",
    "rollout.restart",
    "rollout.sleep_level",
    "rollout.bucket_mib",
    "rollout.sync_proof",
    "rollout.probe_tolerance",
    "rollout.quantization",
    "rollout.adapter_sync",  # how they travel
    "rollout.memory_fraction",
    "rollout.return_routes",
    "rollout.layout",
    "rollout.sequences_per_rank",
    "rollout.draft_tokens",
    "rollout.vllm",
    "rollout.sglang",
    "reward.timeout_s",
    "reward.step_timeout_s",
    "reward.on_error",  # what failed before may be why the run goes on
    "mismatch",
    "optimizer.cpu_fraction",
    "sft.optimizer.cpu_fraction",
    "critic.optimizer.cpu_fraction",
    "train.steps",
    "train.eval_every_steps",
    "train.eval_prompts",
    "train.eval_samples_per_prompt",
)
"""Keys, and sections with all their keys."""
MAY_NOT = (
    "engine.megatron",
    *("engine.aux_loss", "engine.z_loss", "engine.expert_bias_rate", "engine.replay_routes"),
)
"""Exceptions within them: what changes what the model computes, or what it learns."""
WARM_UP_LENGTH = ("sft.steps", "sft.stop_at_loss")
"""May change while SFT goes on, not when it is over."""


def changed_keys(then: Mapping[str, Any], now: Recipe, stage: str) -> list[tuple[str, Any, Any]]:
    """Return the keys that may not change and did: (key, value in the checkpoint, value now).

    then: the recipe that a checkpoint holds, as JSON; a key that it lacks, because its quintet did not have it yet, counts as
    the default. stage: where the checkpoint is, "sft" or "rl".
    """
    return list(_compare(then, _json(now), _json(Recipe()), stage, ""))


def _compare(
    then: Mapping[str, Any], now: Mapping[str, Any], default: Mapping[str, Any], stage: str, above: str
) -> Iterator[tuple[str, Any, Any]]:
    for name in {**now, **then}:
        key = f"{above}{name}"
        old, new = then.get(name, default.get(name)), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and key not in leaf_keys():
            below = default.get(name)
            yield from _compare(old, new, below if isinstance(below, Mapping) else {}, stage, f"{key}.")
        elif old != new and not may_change(key, stage):
            yield key, old, new


def may_change(key: str, stage: str) -> bool:
    """Return whether a dotted key may change when a run is resumed in `stage`."""
    if any(_within(key, one) for one in MAY_NOT):
        return False
    # Null comes to another type on another device: what model.dtype came to is compared instead.
    free = ("model.dtype", *MAY_CHANGE, *(WARM_UP_LENGTH if stage == "sft" else ()))
    return any(_within(key, one) for one in free)


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _json(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json")
