"""Which kinds of training state may leave the devices while generating, where `engine.offload_*` says auto."""

from __future__ import annotations

from quintet.recipe.rollout import placement_of
from quintet.recipe.schema import Recipe

KINDS = ("grads", "optimizer", "params")
"""In the order in which they leave: gradients go without a copy, parameters are needed until the rollout has its weights."""


def on_auto(recipe: Recipe, command: str) -> tuple[str, ...]:
    """Return the kinds that are on auto and may leave: none where nothing has to make room, parameters only where the rollout has
    its own."""
    placement = placement_of(recipe)
    if command == "sft" or placement.separate or recipe.cluster.device == "cpu":
        return ()
    free = KINDS[:2] if placement.shares_weights else KINDS
    return tuple(kind for kind in free if share_asked(recipe, kind) is None)


def share_asked(recipe: Recipe, kind: str) -> float | None:
    """Return the share of a kind that the recipe sets; None is auto."""
    share = getattr(recipe.engine, f"offload_{kind}")
    return None if share == "auto" else float(share)
