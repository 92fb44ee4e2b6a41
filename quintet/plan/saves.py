"""What saves take on the disk, before there has been one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from quintet.models import ModelShape
from quintet.recipe import schema


def model_bytes(shape: ModelShape, dtype: Literal["fp32", "bf16"]) -> int:
    """Of the weights alone: a Hugging Face directory, or a stored reference policy."""
    return shape.parameter_count * (2 if dtype == "bf16" else 4)


def checkpoint_bytes(
    shape: ModelShape, dtype: Literal["fp32", "bf16"], optimizers: Iterable[schema.Optimizer]
) -> int:
    """Of a checkpoint in any layout: the weights, and of each an fp32 master (in bf16) and the optimizer's fp32 moments.

    optimizers: of the run's stages; the one with the most state counts.
    """
    master = 4 if dtype == "bf16" else 0
    state = max((master + _moments(one) for one in optimizers), default=0)
    return model_bytes(shape, dtype) + shape.parameter_count * state


def _moments(optimizer: schema.Optimizer) -> int:
    if optimizer.name != "sgd":
        return 8
    return 4 if optimizer.momentum else 0
