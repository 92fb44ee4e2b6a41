"""MiMo-7B (https://arxiv.org/abs/2505.07608)."""

from dataclasses import replace

from quintet.models.dense import dense_shape, read_mtp_layers
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import ModelShape
from quintet.models.table import MtpNames, Names


@register
class Mimo(Family):
    """Qwen2's trunk and a layer for multi-token prediction of its own kind: of the same parts as DeepSeek-V3's, but its
    projection takes the hidden state first, and that state is the trunk's before its final norm."""

    name = "mimo"
    architectures = ("MiMoForCausalLM",)
    defaults = {"num_key_value_heads": 32}
    names = Names(
        mtp=MtpNames(
            layer="model.mtp_layers.{}",
            numbered_on=False,
            embedding_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            projection="input_proj",
            hidden_first=True,
            final_norm="final_layernorm",
            embedding_copy=None,
            head_copy=None,
            reads_normed=False,
        )
    )

    def shape(self, config: HfConfig) -> ModelShape:
        shape = dense_shape(config, self.name, qkv_bias=True)
        return replace(shape, mtp_layers=read_mtp_layers(config))
