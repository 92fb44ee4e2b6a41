"""megatron-core's configuration of a model in a layout: where a shape, a layout and a recipe become its fields."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig

from quintet.engine import fp8
from quintet.engine.mesh import Mesh
from quintet.errors import UserError
from quintet.models import MlaShape, ModelShape, MoeShape
from quintet.recipe import schema
from quintet.recipe.megatron import FUSED_EXPERTS, PERMUTATION, TORCH_EXPERTS
from quintet.recipe.recompute import MODULES, recompute_modules


class StageLayers(PipelineParallelLayerLayout):
    """Uneven stages, as this rank sees them: core asks its own for the rank's place in process-global groups, which are not made."""

    def __init__(self, layout: schema.Layout, layers: int, stage: int) -> None:
        counts = layout.stage_layers or []
        rows = [["decoder"] * count for count in counts]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        super().__init__(rows, layout.pp)
        self._chunks, self._stage = [layout.layers_of(layers, one) for one in range(layout.pp)], stage

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return how many decoder layers a chunk has, of this rank's stage where none is named."""
        return len(self._of(vp_stage, pp_rank))

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return how many decoder layers come before a chunk."""
        return self._of(vp_stage, pp_rank).start

    def _of(self, chunk: int | None, stage: int | None) -> range:
        return self._chunks[self._stage if stage is None else stage][chunk or 0]


def transformer_config(
    shape: ModelShape, layout: schema.Layout, mesh: Mesh, recipe: schema.Engine, *, dtype: torch.dtype
) -> TransformerConfig:
    """Return the fields of a model in a layout; `recipe.megatron` overrides them by name.

    Raises UserError for a field megatron-core does not have, and for recomputing what the model does not hold.
    """
    kind = MLATransformerConfig if shape.mla else TransformerConfig
    unknown = [k for k in recipe.megatron if k not in kind.__dataclass_fields__]
    if unknown:
        raise UserError(f"engine.megatron.{unknown[0]}: megatron-core's {kind.__name__} has no such field")
    fields = _model(shape, dtype) | _layout(layout, mesh, dtype) | _recompute(shape, recipe)
    fields |= fp8.fields(recipe.fp8)
    if shape.moe:
        fields |= _experts(shape, shape.moe)
    if shape.mla:
        fields |= _latent(shape.mla)
    if layout.stage_layers is not None:
        fields["pipeline_model_parallel_layout"] = StageLayers(layout, shape.layers, mesh.at("pp"))
    config = kind(**{**fields, **recipe.megatron})
    if config.moe_router_fusion and "moe_router_fusion" not in fused_kernels("transformer_engine"):
        raise UserError(
            "engine.megatron.moe_router_fusion is a kernel of TransformerEngine 2.6 or later, which is not installed here; remove it"
        )
    if recipe.recompute == "selective":
        config.recompute_modules = recompute_modules(recipe, shape)  # core knows no mlp_act
    # Not in the constructor, which refuses biases of experts under etp: core's would be added once a rank, ours are not.
    config.add_bias_linear = shape.proj_bias
    return config


def fused_kernels(backend: str) -> list[str]:
    """Return which kernels of experts can be had here with a back end of layers: some of `EXPERT_KERNELS`."""
    needs = {
        PERMUTATION: (
            *("fused_permute", "fused_permute_with_probs", "fused_unpermute"),
            *("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs"),
        ),
        "moe_router_fusion": ("fused_topk_with_score_function",),
    }
    if backend != "transformer_engine":
        return []
    fused = [one for one in FUSED_EXPERTS if all(getattr(moe_utils, name, None) for name in needs[one])]
    return [*fused, TORCH_EXPERTS]


def _model(shape: ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_eps,
        "qk_layernorm": shape.qk_norm,
        "add_qkv_bias": shape.qkv_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Losses are normalised by global counts, so gradients are summed over ranks and never rescaled.
        "calculate_per_token_loss": True,
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": not on_gpu,
        # Without it core 0.16.1 does not mark weights as tensor parallel, and the gradient norm comes out wrong.
        "perform_initialization": True,
    }


def _layout(layout: schema.Layout, mesh: Mesh, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": mesh.sizes.tp,
        "pipeline_model_parallel_size": mesh.sizes.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        # Interleaved stages with batched sends give wrong gradients, silently (core 0.16.1).
        "batch_p2p_comm": layout.vpp == 1,
        "overlap_p2p_comm": layout.vpp > 1,
        "context_parallel_size": mesh.sizes.cp,
        "sequence_parallel": layout.sp,
        "expert_model_parallel_size": mesh.sizes.ep,
        "expert_tensor_parallel_size": mesh.sizes.etp,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable lengths, experts or not
        "deallocate_pipeline_outputs": True,
    }


def _experts(shape: ModelShape, moe: MoeShape) -> dict[str, Any]:
    """The expert bias is no field: core's would be updated from counts that include padding (engine/layers/router.py)."""
    limited = moe.group_top_k < moe.groups
    return {
        "num_moe_experts": moe.experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_layer_freq": [int(moe.is_moe(i)) for i in range(shape.layers)],
        "moe_grouped_gemm": True,
        "moe_router_topk": moe.top_k,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": moe.score,
        # A softmax over the chosen experts alone is the one over all of them, normalised.
        "moe_router_pre_softmax": not moe.normalize,
        "moe_router_num_groups": moe.groups if limited else None,
        "moe_router_group_topk": moe.group_top_k if limited else None,
        "moe_router_topk_scaling_factor": moe.scaling_factor if moe.scaling_factor != 1.0 else None,
    }


def _latent(mla: MlaShape) -> dict[str, Any]:
    """Sizes alone: rotary tables come with the row, the softmax scale from the shape."""
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope",
    }


def _recompute(shape: ModelShape, recipe: schema.Engine) -> dict[str, Any]:
    if recipe.recompute == "none":
        return {}
    if recipe.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    names = recompute_modules(recipe, shape)
    for module in names:
        if module in MODULES and not MODULES[module][1](shape):
            raise UserError(
                f"engine.recompute_modules: {module} is not part of a {shape.family} model like this one; leave it out"
            )
    cores = [one for one in names if one != "mlp_act"]
    return {"recompute_granularity": "selective", "recompute_modules": cores}
