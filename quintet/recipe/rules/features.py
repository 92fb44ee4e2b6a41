"""Rules of features: what is available, what goes together, what is installed and read."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterator

from quintet.install import with_extra
from quintet.recipe.elsewhere import WORDS
from quintet.recipe.features import FEATURES
from quintet.recipe.megatron import (
    FREE,
    FUSED_EXPERTS,
    asks_routers,
    transformer_config_fields,
    why_refused,
)
from quintet.recipe.problem import Problem
from quintet.recipe.refused import NEEDS_GPU, NOT_AVAILABLE, REFUSED_PAIRS
from quintet.recipe.rules.facts import Facts, rule


@rule
def only_available_features(facts: Facts) -> Iterator[Problem]:
    """A feature this version does not have is refused by name."""
    for one, instead in NOT_AVAILABLE:
        if one.is_on(facts.recipe, facts.shape):
            yield Problem(f"{one.key}: {one.name} is not available in this version; {instead}", *one.keys)


@rule
def features_go_together(facts: Facts) -> Iterator[Problem]:
    """Two features that cannot be combined are refused by both names."""
    for pair in REFUSED_PAIRS:
        a, b = FEATURES[pair.first], FEATURES[pair.second]
        both = a.is_on(facts.recipe, facts.shape) and b.is_on(facts.recipe, facts.shape)
        if both and facts.command in pair.commands:
            yield Problem(pair.sentence(facts.recipe), *a.keys, *b.keys)


@rule
def devices_suffice(facts: Facts) -> Iterator[Problem]:
    """What needs GPUs is not asked of CPU ranks."""
    if facts.recipe.cluster.device != "cpu":
        return
    for need in NEEDS_GPU:
        one = FEATURES[need.feature]
        if one.is_on(facts.recipe, facts.shape):
            yield Problem(need.sentence, *one.keys, "cluster.device")


@rule
def megatron_options_are_free(facts: Facts) -> Iterator[Problem]:
    """engine.megatron sets fields that megatron-core has, that quintet leaves free, and that the layers read."""
    recipe = facts.recipe
    options = recipe.engine.megatron
    known = transformer_config_fields() if options else frozenset()
    for name, value in options.items():
        key = f"engine.megatron.{name}"
        if known and name not in known:
            near = next(iter(difflib.get_close_matches(name, known, 1)), None)
            free = f"did you mean {near}?" if near in FREE else None
            other = f"{near} is {why_refused(near)}" if near else "remove it"
            close = f"it is {why_refused(name)}" if name in WORDS else free or other
            yield Problem(f"{key}: megatron-core's TransformerConfig has no such field; {close}")
        elif name not in FREE:
            yield Problem(f"{key}: {why_refused(name)}; remove it")
        elif name in FUSED_EXPERTS and value:
            if facts.shape is not None and facts.shape.moe is None:
                yield Problem(f"{key} is of experts, and the model has none; remove it")
            elif recipe.cluster.device == "cpu" or recipe.engine.backend == "portable":
                yield Problem(
                    f"{key} is a kernel of TransformerEngine's, which portable layers do not use; remove it, or set "
                    "engine.backend=transformer_engine on GPUs"
                )
            elif name == "moe_router_fusion" and (asking := asks_routers(recipe)):
                yield Problem(
                    f"{key} does not go with {asking}: that router asks for no routes and tells none; remove one of the two"
                )


@rule
def backend_options_are_read(facts: Facts) -> Iterator[Problem]:
    """Options of a rollout back end are given only with that back end."""
    rollout = facts.recipe.rollout
    for name, options in (("vllm", rollout.vllm), ("sglang", rollout.sglang)):
        if options and rollout.backend != name:
            yield Problem(
                f"rollout.{name} has options, but rollout.backend is {rollout.backend}, which does not read them; remove them"
            )


_WANDB_MODES = "online, offline, shared, disabled, dryrun, run"


@rule
def trackers_can_start(facts: Facts) -> Iterator[Problem]:
    """A tracker's package is there before the run starts, and W&B knows the mode that the environment asks for."""
    mode = os.environ.get("WANDB_MODE") or "online"
    for tracker in facts.recipe.run.trackers:
        if importlib.util.find_spec(tracker) is None:
            yield Problem(
                f"run.trackers: {tracker} is not installed; {with_extra(tracker)}, or remove it from run.trackers",
            )
        elif tracker == "wandb" and mode not in _WANDB_MODES.split(", "):
            yield Problem(
                f"run.trackers: WANDB_MODE={mode} in the environment is no mode of W&B ({_WANDB_MODES}); correct or unset it"
            )
