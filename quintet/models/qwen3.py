"""Qwen3, dense."""

from quintet.models.dense import dense_shape, refuse_biases
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import ModelShape


@register
class Qwen3(Family):
    """The family with RMS norm on each head of q and k, no biases."""

    name = "qwen3"
    architectures = ("Qwen3ForCausalLM",)
    defaults = {"num_key_value_heads": 32, "head_dim": 128}

    def shape(self, config: HfConfig) -> ModelShape:
        refuse_biases(config, "attention_bias")
        return dense_shape(config, self.name, qk_norm=True)
