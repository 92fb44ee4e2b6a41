"""Llama 3."""

from quintet.errors import UserError
from quintet.models.dense import dense_shape, dense_weights
from quintet.models.family import Family, ModelShape, register


def _shape(config: dict) -> ModelShape:
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UserError(f"config.json: {key}=true is not supported for llama models")
    return dense_shape(config, "llama", qk_norm=False, qkv_bias=False, tied_by_default=False)


FAMILY = register(Family("llama", ("LlamaForCausalLM",), _shape, dense_weights))
