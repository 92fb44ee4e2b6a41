"""What `engine.recompute=selective` computes again, by module."""

from __future__ import annotations

from quintet.models import ModelShape
from quintet.recipe.schema import Engine

MODULES = {
    "mlp": ("layers without experts", lambda shape: len(shape.moe_layers) < shape.layers),
    "mlp_act": ("layers without experts", lambda shape: len(shape.moe_layers) < shape.layers),
    "moe": ("experts", lambda shape: shape.moe is not None),
    "moe_act": ("experts", lambda shape: shape.moe is not None),
    "shared_experts": (
        "shared experts",
        lambda shape: shape.moe is not None and shape.moe.shared_ffn_hidden_size > 0,
    ),
    "mla_up_proj": ("latent attention", lambda shape: shape.mla is not None),
}
"""Module → what a model must have for it, in words and in its shape. Others are in every model."""

_BEST = ("mlp", "moe_act", "shared_experts", "mla_up_proj")
"""What saves the most for the least work. `core_attn` is not among them: flash kernels keep nothing that the layers
around them do not keep as well."""


def recompute_modules(engine: Engine, shape: ModelShape) -> list[str]:
    """Return modules that are computed again: those the recipe names, or else what serves this model best."""
    if engine.recompute != "selective":
        return []
    if engine.recompute_modules is not None:
        return list(engine.recompute_modules)
    return [name for name in _BEST if MODULES[name][1](shape)]


def without_products(shape: ModelShape) -> list[str]:
    """Return modules that take no product to compute again: they save the least, and cost hardly anything."""
    return [*(name for name in ("mlp_act", "moe_act") if MODULES[name][1](shape)), "layernorm"]
