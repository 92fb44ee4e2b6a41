"""Rules of the engine: its layers, what it computes again, and what of its memory it gives away."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.problem import Problem
from quintet.recipe.recompute import MODULES
from quintet.recipe.rules.facts import Facts, rule


@rule
def layers_are_installed(facts: Facts) -> Iterator[Problem]:
    """TransformerEngine's layers need TransformerEngine, where this machine runs the ranks."""
    recipe = facts.recipe
    if (
        recipe.engine.backend == "transformer_engine"
        and recipe.cluster.device != "cpu"  # refused by name already
        and facts.lacks("transformer_engine")
    ):
        yield Problem(
            "engine.backend=transformer_engine: TransformerEngine is not installed here; install transformer-engine[pytorch], "
            "or use engine.backend=auto, which then takes the portable layers"
        )


@rule
def gathering_needs_buckets(facts: Facts) -> Iterator[Problem]:
    """Parameters are gathered layer by layer in the buckets that gradients are reduced in."""
    engine = facts.recipe.engine
    if engine.overlap_param_gather and not engine.overlap_grad_reduce:
        yield Problem(
            "engine.overlap_param_gather=true needs the buckets of engine.overlap_grad_reduce=true: without them all parameters are one, for "
            "which the first layer would wait; set both, or neither"
        )


@rule
def travelling_needs_ranks(facts: Facts) -> Iterator[Problem]:
    """Tokens travel to experts where these are spread over ranks."""
    recipe, shape = facts.recipe, facts.shape
    if recipe.engine.overlap_dispatch and (
        recipe.layout.ep == 1 or (shape is not None and shape.moe is None)
    ):
        yield Problem(
            "engine.overlap_dispatch=true has tokens travel to experts while others are computed, and here none travels: each rank has all "
            "experts, or the model has none; set layout.ep above 1, or remove it"
        )


@rule
def recompute_modules_are_there(facts: Facts) -> Iterator[Problem]:
    """Modules to compute again are named for selective recompute alone, and the model has each of them."""
    engine, shape = facts.recipe.engine, facts.shape
    key, names = "engine.recompute_modules", engine.recompute_modules
    if names is None:
        return
    if engine.recompute != "selective":
        yield Problem(
            f"{key}=[{', '.join(names)}] is read by engine.recompute=selective alone, and it is {engine.recompute}; "
            "remove it, or set engine.recompute=selective"
        )
        return
    if not names:
        yield Problem(
            f"{key} is empty: engine.recompute=selective would compute nothing again; leave it out, or set "
            "engine.recompute=none"
        )
    for name in names:
        what, has = MODULES.get(name, ("", lambda shape: True))
        if shape is not None and not has(shape):
            yield Problem(f"{key}: {name} is of {what}, and the model has none; remove it")
    for whole, parts in {"mlp": ("mlp_act",), "moe": ("moe_act", "shared_experts")}.items():
        for part in [one for one in names if one in parts and whole in names]:
            yield Problem(
                f"{key}: {part} is part of {whole}, which would compute it again a second time; name one"
            )
