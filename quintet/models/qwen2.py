"""Qwen2 and Qwen2.5."""

from quintet.models.dense import dense_shape
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import ModelShape


@register
class Qwen2(Family):
    """The family with biases on q, k and v."""

    name = "qwen2"
    architectures = ("Qwen2ForCausalLM",)
    defaults = {"num_key_value_heads": 32}

    def shape(self, config: HfConfig) -> ModelShape:
        return dense_shape(config, self.name, qkv_bias=True)
