"""Llama 3."""

from quintet.models.dense import dense_shape, refuse_biases
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import ModelShape
from quintet.models.table import decoder_weights


def _shape(config: HfConfig) -> ModelShape:
    refuse_biases(config, "attention_bias", "mlp_bias")
    return dense_shape(config, "llama", qk_norm=False, qkv_bias=False, tied_by_default=False)


FAMILY = register(Family("llama", ("LlamaForCausalLM",), _shape, decoder_weights))
