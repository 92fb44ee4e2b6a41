"""GLM-4.5 and GLM-4.6 with experts (https://arxiv.org/abs/2508.06471)."""

from dataclasses import replace

from quintet.models.dense import dense_shape, read_mtp_layers
from quintet.models.experts import sigmoid_experts
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import ModelShape
from quintet.models.table import MtpNames, Names


@register
class Glm4Moe(Family):
    """The family of grouped-query attention of which a part of each head is turned, with biases on q, k and v and norms on q and
    k where the config says so; DeepSeek-V3's experts and its layer for multi-token prediction."""

    name = "glm4_moe"
    architectures = ("Glm4MoeForCausalLM",)
    defaults = {"num_key_value_heads": 8}
    names = Names(mtp=MtpNames())

    def shape(self, config: HfConfig) -> ModelShape:
        shape = dense_shape(
            config,
            self.name,
            qk_norm=config.flag("use_qk_norm", False),
            qkv_bias=config.flag("attention_bias", False),
            rotary_share=0.5,
        )
        moe = sigmoid_experts(config, shape.layers)
        return replace(shape, moe=moe, mtp_layers=read_mtp_layers(config))
