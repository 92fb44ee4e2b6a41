"""What follows from a recipe alone, and no key of it says."""

from __future__ import annotations

from quintet.models import ModelShape
from quintet.recipe.schema import Layout, Optimizer, Recipe


def on_device(recipe: Recipe, device: str) -> Recipe:
    """Return the recipe with the device that cluster.device=auto comes to."""
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"device": device})})


def optimizers(recipe: Recipe) -> dict[str, Optimizer]:
    """Return the optimizer sections of a recipe, by key."""
    found = (recipe.optimizer, recipe.sft.optimizer if recipe.sft else None, recipe.critic.optimizer)
    return {one.key: one for one in found if one is not None}


def data_parallel(recipe: Recipe) -> int:
    """Return the size of the data-parallel axis; meaningful once the layout divides the ranks."""
    layout = recipe.layout
    return max(1, recipe.cluster.ranks // (layout.tp * layout.pp * layout.cp))


def moe_layers_of(layout: Layout, shape: ModelShape, stage: int) -> tuple[int, ...]:
    """Return the numbers, from 0, of the layers with experts that a pipeline stage has, chunk after chunk."""
    chunks = layout.layers_of(shape.layers, stage)
    return tuple(layer for chunk in chunks for layer in chunk if shape.is_moe(layer))
