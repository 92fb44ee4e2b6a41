"""Qwen3, dense: RMS norm on each head of q and k, no biases."""

from quintet.models.dense import dense_shape, refuse_biases
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import ModelShape
from quintet.models.table import decoder_weights


def _shape(config: HfConfig) -> ModelShape:
    refuse_biases(config, "attention_bias")
    return dense_shape(config, "qwen3", qk_norm=True, qkv_bias=False, tied_by_default=False)


FAMILY = register(Family("qwen3", ("Qwen3ForCausalLM",), _shape, decoder_weights))
