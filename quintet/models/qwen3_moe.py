"""Qwen3, mixture of experts."""

from dataclasses import replace

from quintet.models.dense import dense_shape, refuse_biases
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import ModelShape, MoeShape


@register
class Qwen3Moe(Family):
    """Qwen3's attention, and experts weighed by a softmax over all of them."""

    name = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)
    defaults = {"num_key_value_heads": 4}

    def shape(self, config: HfConfig) -> ModelShape:
        refuse_biases(config, "attention_bias")
        shape = dense_shape(config, self.name, qk_norm=True)
        # transformers 5 writes num_local_experts, checkpoints before it num_experts.
        key = "num_local_experts" if config.has("num_local_experts") else "num_experts"
        experts, top_k = config.whole(key), config.whole("num_experts_per_tok")
        if not 1 < top_k <= experts:
            raise config.wrong("num_experts_per_tok", f"2 to {key}={experts}")
        step, dense = config.whole("decoder_sparse_step", 1), config.counts("mlp_only_layers")
        moe = MoeShape(
            experts=experts,
            top_k=top_k,
            ffn_hidden_size=config.whole("moe_intermediate_size"),
            dense_layers=tuple(i for i in range(shape.layers) if i in dense or (i + 1) % step),
            normalize=config.flag("norm_topk_prob", False),
        )
        if len(moe.dense_layers) == shape.layers:
            raise config.wrong("decoder_sparse_step", "a value that leaves a layer with experts")
        return replace(shape, moe=moe)
