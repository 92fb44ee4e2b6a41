"""Mixtral (https://arxiv.org/abs/2401.04088)."""

from dataclasses import replace

from quintet.models.dense import dense_shape
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import ModelShape, MoeShape
from quintet.models.table import Names


@register
class Mixtral(Family):
    """Llama's attention, and experts in every layer, weighed by a softmax over the chosen ones."""

    name = "mixtral"
    architectures = ("MixtralForCausalLM",)
    defaults = {"num_key_value_heads": 8, "rope_theta": 1e6}
    names = Names(moe="block_sparse_moe", expert_gate="w1", expert_up="w3", expert_down="w2")

    def shape(self, config: HfConfig) -> ModelShape:
        if config.has("sliding_window"):
            raise config.wrong(
                "sliding_window", "null: sliding-window attention is not part of this family here"
            )
        if config.has("router_jitter_noise") and config.data["router_jitter_noise"] != 0:
            raise config.wrong(
                "router_jitter_noise", "0: routes must be the same each time they are computed"
            )
        shape = dense_shape(config, self.name)
        experts, top_k = config.whole("num_local_experts"), config.whole("num_experts_per_tok")
        if not 1 < top_k <= experts:
            raise config.wrong("num_experts_per_tok", f"2 to num_local_experts={experts}")
        return replace(shape, moe=MoeShape(experts, top_k, ffn_hidden_size=shape.ffn_hidden_size))
