"""Qwen2 and Qwen2.5: biases on q, k and v."""

from quintet.models.dense import dense_shape
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import ModelShape
from quintet.models.table import decoder_weights


def _shape(config: HfConfig) -> ModelShape:
    return dense_shape(config, "qwen2", qk_norm=False, qkv_bias=True, tied_by_default=False)


FAMILY = register(Family("qwen2", ("Qwen2ForCausalLM",), _shape, decoder_weights))
