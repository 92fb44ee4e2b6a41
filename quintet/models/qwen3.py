"""Qwen3, dense: RMS norm on each head of q and k, no biases."""

from quintet.errors import UserError
from quintet.models.dense import dense_shape, dense_weights
from quintet.models.family import Family, ModelShape, register


def _shape(config: dict) -> ModelShape:
    if config.get("attention_bias"):
        raise UserError("config.json: attention_bias=true is not supported for qwen3 models")
    return dense_shape(config, "qwen3", qk_norm=True, qkv_bias=False, tied_by_default=False)


FAMILY = register(Family("qwen3", ("Qwen3ForCausalLM",), _shape, dense_weights))
