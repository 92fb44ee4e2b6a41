"""Experts that several families have alike, read from their config.json."""

from __future__ import annotations

from quintet.models.hf_config import HfConfig
from quintet.models.shape import MoeShape


def sigmoid_experts(config: HfConfig, layers: int) -> MoeShape | None:
    """Return the sizes of experts as DeepSeek-V3 has them: chosen by sigmoid scores plus a stored bias among the best groups,
    beside shared ones, in all layers but the first few. None where those are all.

    Raises UserError for any other routing.
    """
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
