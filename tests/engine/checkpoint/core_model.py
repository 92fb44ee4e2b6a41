"""megatron-core's own GPTModel of a shape, from its stock local layers: what reads and writes Megatron's checkpoints."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

SINGLE = {"singleton_local_shards": True}
"""Asks core for one tensor a layer and expert."""


def core_model(shape: Any, layout: Any) -> tuple[Any, Any]:
    """The model of this rank, weights drawn at random, and its mesh."""
    import torch.distributed as dist

    from quintet.engine import megatron_compat

    megatron_compat.install()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from quintet.engine import build
    from quintet.engine.config import transformer_config
    from quintet.recipe import schema

    mesh = build.mesh_of(layout, dist.get_world_size())
    config = transformer_config(shape, layout, mesh, schema.Engine(), dtype=torch.float32)
    config.moe_grouped_gemm = False
    config.qk_layernorm = shape.qk_norm or shape.mla is not None
    config.moe_router_enable_expert_bias = bool(shape.moe and shape.moe.bias)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", pp_rank=mesh.at("pp")
    )
    for layer in spec.layer_specs:
        _name_as_transformer_engine(shape, layer)
    # core's latent attention believes that TransformerEngine is there.
    with patch("megatron.core.transformer.multi_latent_attention.HAVE_TE", False):
        model = GPTModel(
            config,
            spec,
            vocab_size=-(-shape.vocab_size // layout.tp) * layout.tp,
            max_sequence_length=shape.max_positions,
            pre_process=mesh.first_stage,
            post_process=mesh.last_stage,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=int(shape.rope.theta),
            pg_collection=mesh.groups,
        )
    return model, mesh


def sharded(model: Any, mesh: Any, metadata: dict[str, Any] = SINGLE) -> dict[str, Any]:
    """core's description of what this rank holds, tensors alone."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state = model.sharded_state_dict(metadata={**metadata, "dp_cp_group": mesh.groups.dp_cp})
    return {name: one for name, one in state.items() if not isinstance(one, ShardedObject)}


def _name_as_transformer_engine(shape: Any, layer: Any) -> None:
    """The layers that models are trained with are TransformerEngine's, where a norm is part of the linear layer after
    it. core's local layers go by the same names in dense layers alone."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.moe_layer import MoELayer

    names = layer.submodules.sharded_state_dict_keys_map
    moe = layer.submodules.mlp.module is MoELayer
    if moe:
        names.pop("pre_mlp_layernorm.", None)
    if shape.mla:
        names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
        if not moe:
            names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        # The local kernel does not know of latent attention; nothing runs here.
        layer.submodules.self_attention.submodules.core_attention = IdentityOp
