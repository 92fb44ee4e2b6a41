"""What follows from a recipe alone, and no key of it says: its optimizers, its roles beside the policy and what each of them is."""

from __future__ import annotations

from pathlib import Path

from quintet.models import ModelShape, trained_shape
from quintet.recipe.schema import Layout, Optimizer, Recipe


def on_device(recipe: Recipe, device: str, model_dir: Path | None = None) -> Recipe:
    """Return the recipe with the device that cluster.device=auto comes to. model_dir: what stands for a path, or a name of the hub, that need
    not be one on this node."""
    model = recipe.model.model_copy(update={"path": recipe.model.path and (model_dir or recipe.model.path)})
    cluster = recipe.cluster.model_copy(update={"device": device})
    return recipe.model_copy(update={"cluster": cluster, "model": model})


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


def roles_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the roles that `quintet train` needs beside the policy, in the order in which they are made."""
    algorithm = recipe.algorithm
    return (
        *(("reference",) if algorithm.kl_coef > 0 else ()),
        *(("critic",) if algorithm.name == "ppo" else ()),
    )


def layout_of(recipe: Recipe, role: str) -> Layout:
    """Return a role's layout: its own, or the policy's."""
    own = {"reference": recipe.reference.layout, "critic": recipe.critic.layout}.get(role)
    return own or recipe.layout


def optimizer_of(recipe: Recipe, role: str) -> Optimizer:
    """Return a trained role's optimizer: its own, or the policy's."""
    return (recipe.critic.optimizer if role == "critic" else None) or recipe.optimizer


def critic_shape(recipe: Recipe, policy: ModelShape) -> ModelShape:
    """Return the value model's shape: that of critic.path, or the policy's. Raises UserError for a path that cannot be read."""
    trunk = policy if recipe.critic.path is None else trained_shape(recipe.critic.path)
    return trunk.as_value_model()
