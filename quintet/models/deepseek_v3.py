"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437) and models of its architecture."""

from dataclasses import replace

from quintet.models.dense import dense_shape, refuse_biases
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import MlaShape, ModelShape, MoeShape


@register
class DeepseekV3(Family):
    """Latent attention, shared experts, and routed ones chosen by sigmoid scores plus a bias, among the best groups."""

    name = "deepseek_v3"
    architectures = ("DeepseekV3ForCausalLM",)

    def shape(self, config: HfConfig) -> ModelShape:
        refuse_biases(config, "attention_bias")
        mla = _latent(config)
        shape = dense_shape(
            config,
            self.name,
            qk_norm=False,
            qkv_bias=False,
            tied_by_default=False,
            head_dim=mla.qk_head_dim,
        )
        if shape.kv_heads != shape.heads:
            raise config.wrong(
                "num_key_value_heads", f"num_attention_heads={shape.heads}, as its heads share no keys"
            )
        moe = _experts(config, shape.layers)
        return replace(shape, mla=mla, moe=moe, mtp_layers=config.count("num_nextn_predict_layers", 0))


def _latent(config: HfConfig) -> MlaShape:
    mla = MlaShape(
        q_lora_rank=config.whole("q_lora_rank") if config.has("q_lora_rank") else None,
        kv_lora_rank=config.whole("kv_lora_rank"),
        qk_nope_head_dim=config.whole("qk_nope_head_dim"),
        qk_rope_head_dim=config.whole("qk_rope_head_dim"),
        v_head_dim=config.whole("v_head_dim"),
        interleaved=config.flag("rope_interleave", True),
    )
    if mla.qk_rope_head_dim % 2:
        raise config.wrong("qk_rope_head_dim", "an even number: rotary embedding turns pairs")
    return mla


def _experts(config: HfConfig, layers: int) -> MoeShape | None:
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.text(key, only) != only:
            raise config.wrong(key, f'"{only}": no other routing is supported')
    if config.count("moe_layer_freq", 1) != 1:
        raise config.wrong("moe_layer_freq", "1: experts in every layer after the first_k_dense_replace ones")
    dense = config.count("first_k_dense_replace")
    if dense >= layers:
        return None
    experts, top_k = config.whole("n_routed_experts"), config.whole("num_experts_per_tok")
    if not 1 < top_k <= experts:
        raise config.wrong("num_experts_per_tok", f"2 to n_routed_experts={experts}")
    if not config.flag("norm_topk_prob", True):
        raise config.wrong("norm_topk_prob", "true: sigmoid weights that do not sum to one are not supported")
    groups, group_top_k = config.whole("n_group", 1), config.whole("topk_group", 1)
    if experts % groups or group_top_k > groups or experts // groups * group_top_k < top_k:
        raise config.wrong(
            "topk_group", f"groups with room for {top_k} of {experts} experts in n_group={groups}"
        )
    if group_top_k < groups and top_k // group_top_k != 2:
        # megatron-core counts a group by its best top_k // topk_group experts, the model by its best two.
        raise config.wrong("topk_group", f"num_experts_per_tok={top_k} divided by 2, or n_group")
    width = config.whole("moe_intermediate_size")
    return MoeShape(
        experts=experts,
        top_k=top_k,
        ffn_hidden_size=width,
        shared_ffn_hidden_size=width * config.whole("n_shared_experts"),
        dense_layers=tuple(range(dense)),
        score="sigmoid",
        scaling_factor=config.number("routed_scaling_factor", 1.0),
        groups=groups,
        group_top_k=group_top_k,
        bias=True,
    )
