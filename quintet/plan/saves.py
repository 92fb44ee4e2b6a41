"""What saves take on the disk, before there has been one."""

from __future__ import annotations

from typing import Literal

from quintet.models import ModelShape, table_of
from quintet.models.lora import adapter_parameters
from quintet.recipe import schema
from quintet.recipe.derived import critic_shape, optimizers, roles_of
from quintet.recipe.lora import lora_shape

Type = Literal["fp32", "bf16"]


def weights_bytes(recipe: schema.Recipe, shape: ModelShape, dtype: Type) -> int:
    """Return the bytes of the weights that are trained: all of them, or the adapters."""
    return _trained(recipe, shape) * _width(dtype)


def export_bytes(shape: ModelShape, dtype: Type) -> int:
    """Return the bytes of a Hugging Face directory, with adapters merged."""
    return shape.parameter_count * _width(dtype)


def checkpoint_bytes(recipe: schema.Recipe, shape: ModelShape, dtype: Type) -> int:
    """Return the bytes of a checkpoint in any layout: the weights that are trained, of each an fp32 master (in bf16) and the
    optimizer's fp32 moments, of the stage with the most."""
    master = 4 if dtype == "bf16" else 0
    found = optimizers(recipe)
    of_critic = found.pop("critic.optimizer", recipe.optimizer)
    each = [(shape, max(_moments(one) for one in found.values()))]
    if "critic" in roles_of(recipe):
        each.append((critic_shape(recipe, shape), _moments(of_critic)))
    return sum(_trained(recipe, one) * (_width(dtype) + master + moments) for one, moments in each)


def _trained(recipe: schema.Recipe, shape: ModelShape) -> int:
    lora = lora_shape(recipe, shape)
    if lora is None:
        return shape.parameter_count
    return adapter_parameters(table_of(shape), lora)


def _width(dtype: Type) -> int:
    return 2 if dtype == "bf16" else 4


def _moments(optimizer: schema.Optimizer) -> int:
    if optimizer.name != "sgd":
        return 8
    return 4 if optimizer.momentum else 0
