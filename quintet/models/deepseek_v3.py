"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437) and models of its architecture."""

from dataclasses import replace

from quintet.models.dense import dense_shape, read_mtp_layers, refuse_biases
from quintet.models.experts import sigmoid_experts
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import MlaShape, ModelShape
from quintet.models.table import MtpNames, Names


@register
class DeepseekV3(Family):
    """The family of latent attention, shared experts, and routed ones chosen by sigmoid scores plus a bias, among the best
    groups."""

    name = "deepseek_v3"
    architectures = ("DeepseekV3ForCausalLM",)
    defaults = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    names = Names(mtp=MtpNames())

    def shape(self, config: HfConfig) -> ModelShape:
        refuse_biases(config, "attention_bias")
        mla = _latent(config)
        shape = dense_shape(config, self.name, head_dim=mla.qk_head_dim)
        if shape.kv_heads != shape.heads:
            raise config.wrong(
                "num_key_value_heads", f"num_attention_heads={shape.heads}, as its heads share no keys"
            )
        moe = sigmoid_experts(config, shape.layers)
        return replace(shape, mla=mla, moe=moe, mtp_layers=read_mtp_layers(config))


def _latent(config: HfConfig) -> MlaShape:
    mla = MlaShape(
        # Null is none at all; without the key there is one.
        q_lora_rank=None if config.data.get("q_lora_rank", 0) is None else config.whole("q_lora_rank", 1536),
        kv_lora_rank=config.whole("kv_lora_rank"),
        qk_nope_head_dim=config.whole("qk_nope_head_dim"),
        qk_rope_head_dim=config.whole("qk_rope_head_dim"),
        v_head_dim=config.whole("v_head_dim"),
        interleaved=config.flag("rope_interleave", True),
    )
    if mla.qk_rope_head_dim % 2:
        raise config.wrong("qk_rope_head_dim", "an even number: rotary embedding turns pairs")
    return mla
