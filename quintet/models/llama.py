"""Llama 3."""

from quintet.models.dense import dense_shape, refuse_biases
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import ModelShape


@register
class Llama(Family):
    """The family with neither biases nor norms of q and k."""

    name = "llama"
    architectures = ("LlamaForCausalLM",)

    def shape(self, config: HfConfig) -> ModelShape:
        refuse_biases(config, "attention_bias", "mlp_bias")
        return dense_shape(config, self.name)
