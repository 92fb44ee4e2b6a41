"""Rules of features: what is available, installed and read."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator

from quintet.recipe.features import NOT_AVAILABLE
from quintet.recipe.megatron import REFUSED, transformer_config_fields
from quintet.recipe.rules.facts import Facts, Problem, rule


@rule
def only_available_features(facts: Facts) -> Iterator[Problem]:
    """A feature this version does not have is refused by name."""
    for missing in NOT_AVAILABLE:
        if missing.feature.is_on(facts.recipe):
            yield Problem(
                (missing.feature.key,),
                f"{missing.feature.key}: {missing.feature.name} is not available in this version; {missing.instead}",
            )


@rule
def megatron_options_are_free(facts: Facts) -> Iterator[Problem]:
    """engine.megatron sets fields that megatron-core has, that quintet leaves free, and that the device can do."""
    options = facts.recipe.engine.megatron
    known = transformer_config_fields() if options else frozenset()
    for name, value in options.items():
        key = f"engine.megatron.{name}"
        if name in REFUSED:
            yield Problem((key,), f"{key}: {REFUSED[name]}; remove it")
        elif known and name not in known:
            near = difflib.get_close_matches(name, known - REFUSED.keys(), 1)
            hint = f"; did you mean {near[0]}?" if near else "; remove it"
            yield Problem((key,), f"{key}: megatron-core's TransformerConfig has no such field{hint}")
        elif name == "recompute_granularity" and value is not None and facts.recipe.cluster.device == "cpu":
            yield Problem(
                (key, "cluster.device"),
                f"{key}: megatron-core recomputes activations on GPUs only (it restores the GPU's random state); "
                "remove it, or lower engine.tokens_per_microbatch_per_rank to save memory",
            )


@rule
def backend_options_are_read(facts: Facts) -> Iterator[Problem]:
    """Options of a rollout back end are given only with that back end."""
    rollout = facts.recipe.rollout
    for name, options in (("vllm", rollout.vllm), ("sglang", rollout.sglang)):
        if options and rollout.backend != name:
            yield Problem(
                (f"rollout.{name}",),
                f"rollout.{name} has options, but rollout.backend is {rollout.backend}, which does not read them; remove them",
            )


@rule
def trackers_are_installed(facts: Facts) -> Iterator[Problem]:
    """A tracker's package is there before the run starts."""
    for tracker in facts.recipe.run.trackers:
        if importlib.util.find_spec(tracker) is None:
            yield Problem(
                ("run.trackers",),
                f"run.trackers: {tracker} is not installed; pip install 'quintet[{tracker}]', or remove it from run.trackers",
            )
