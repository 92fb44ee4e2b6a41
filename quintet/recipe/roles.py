"""Which roles a recipe has beside the policy, and what each of them is: its layout, its optimizer."""

from __future__ import annotations

from quintet.models import ModelShape, trained_shape
from quintet.recipe.schema import Layout, Optimizer, Recipe


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
