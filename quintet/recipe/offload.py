"""Which kinds of training state may leave the devices while generating, where `engine.offload_*` says auto."""

from __future__ import annotations

from quintet.recipe.rollout import placement_of
from quintet.recipe.schema import Recipe

NAMES = {"grads": "gradients", "optimizer": "optimizer state", "params": "parameters"}
KINDS = tuple(NAMES)
"""In the order in which they leave: gradients go without a copy, parameters are needed until the rollout has its weights."""


def on_auto(recipe: Recipe, command: str) -> tuple[str, ...]:
    """Return the kinds that are on auto and may leave: none where nothing has to make room, parameters only where the rollout has
    its own."""
    placement = placement_of(recipe)
    if command == "sft" or placement.separate or recipe.cluster.device == "cpu":
        return ()
    free = KINDS[:2] if placement.shares_weights else KINDS
    return tuple(kind for kind in free if share_asked(recipe, kind) is None)


def most_shares(recipe: Recipe, command: str) -> dict[str, float]:
    """Return the largest share of each kind that may leave."""
    return shares_asked(recipe) | dict.fromkeys(on_auto(recipe, command), 1.0)


def shares_asked(recipe: Recipe) -> dict[str, float]:
    """Return the share of each kind that the recipe sets, 0 of those on auto."""
    return {kind: share_asked(recipe, kind) or 0.0 for kind in KINDS}


def share_asked(recipe: Recipe, kind: str) -> float | None:
    """Return the share of a kind that the recipe sets; None is auto."""
    share = getattr(recipe.engine, f"offload_{kind}")
    return None if share == "auto" else float(share)
