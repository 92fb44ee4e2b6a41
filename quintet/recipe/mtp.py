"""From the recipe's section `mtp` to the model's layers for multi-token prediction: which there are, and which are trained."""

from __future__ import annotations

from dataclasses import replace

from quintet.errors import UserError
from quintet.models import ModelShape
from quintet.models.family import families_with_mtp
from quintet.recipe.schema import Recipe


def with_mtp(recipe: Recipe, whole: ModelShape) -> ModelShape:
    """Return the shape of what a recipe loads of a model: with its layers for multi-token prediction, or new ones, where there is a
    section `mtp`. whole: the model as its directory holds it.

    Raises UserError naming the key when there are none, or when there are some where new ones are asked for.
    """
    if recipe.mtp is None:
        return whole.without_mtp()
    new, there, families = recipe.mtp.init_layers, whole.mtp_layers, families_with_mtp()
    if whole.family not in families:
        raise UserError(
            f"mtp: no layers for multi-token prediction are known of the family {whole.family}; models of "
            f"{', '.join(families)} can have them; set mtp=null"
        )
    if new is not None and there:
        raise UserError(
            f"mtp.init_layers={new}: the model has layers for multi-token prediction already ({there}); set mtp.init_layers=null to "
            "take these"
        )
    if new is None and not there:
        raise UserError(
            "mtp: the model has no layers for multi-token prediction; set mtp.init_layers to give it new ones, or mtp=null"
        )
    return replace(whole, mtp_layers=new or there)


def is_made(recipe: Recipe) -> bool:
    """Return whether the model's directory is made when a run starts: built from nothing, or given new layers."""
    return recipe.model.build is not None or (recipe.mtp is not None and recipe.mtp.init_layers is not None)


def depths(recipe: Recipe, shape: ModelShape) -> int:
    """Return how many layers for multi-token prediction are trained."""
    return shape.mtp_layers if recipe.mtp is not None and recipe.mtp.train else 0
