"""Which fields of megatron-core's TransformerConfig `engine.megatron` may set, and why not the others.

A few are free. Of the others some the engine sets itself, some it could not honour: a field that no layer reads would be ignored
without a word, and some are known to give wrong numbers.

Read without importing megatron-core, which would bring in torch and take seconds.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from quintet.recipe.elsewhere import INSTEAD, WORDS
from quintet.recipe.reserved_options import declared_fields

if TYPE_CHECKING:
    from quintet.recipe.schema import Recipe

_REASONS = {
    "decided by model.dtype": """
        fp16 enable_autocast autocast_dtype fp32_residual_connection params_dtype pipeline_dtype bf16
    """,
    "decided by engine.cp_comm": "cp_comm_type hierarchical_context_parallel_sizes",
    (
        "decided by layout.vpp: megatron-core's interleaved schedule computes wrong gradients, without a "
        "word, when it sends in batches (batch_p2p_comm) instead of overlapping (overlap_p2p_comm)"
    ): """
        batch_p2p_comm overlap_p2p_comm batch_p2p_sync overlap_p2p_comm_warmup_flush
        microbatch_group_size_per_vp_stage use_ring_exchange_p2p pipeline_model_parallel_comm_backend
    """,
    "decided by engine.recompute and engine.recompute_modules": """
        recompute_granularity recompute_method recompute_num_layers recompute_modules
        distribute_saved_activations moe_layer_recompute
        num_microbatches_with_partial_activation_checkpoints
    """,
    (
        "activations are not offloaded in this version; engine.recompute saves their memory, and "
        "engine.offload_params, offload_grads and offload_optimizer move the rest while generating"
    ): """
        cpu_offloading cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering fine_grained_activation_offloading
        offload_modules min_offloaded_tensor_size
    """,
    "decided by engine.fp8 (docs/fp8.md)": """
        fp8 fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval fp8_wgrad fp8_amax_history_len fp8_amax_compute_algo
        tp_only_amax_red disable_parameter_transpose_cache
    """,
    "weights stay in model.dtype under engine.fp8: their shards, masters and fingerprints are views of it": "fp8_param",
    "routed choices are padded by experts themselves under engine.fp8, and more of them would be counted and replayed": """
        moe_router_padding_for_quantization moe_router_padding_for_fp8
    """,
    (
        "not available in this version; engine.fp8 multiplies the layers' matrices in 8 bits (and without TransformerEngine, "
        "megatron-core would ignore the field without a word)"
    ): """
        fp8_dot_product_attention fp8_multi_head_attention first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 use_kitchen use_kitchen_attention kitchen_attention_backend fp4 fp4_recipe fp4_param
        fp4_quantizer_factory activation_func_fp8_input_store quant_recipe
    """,
    (
        "decided by engine.aux_loss: megatron-core scales these losses by the tokens of one rank's micro-batch, counts padding "
        "among them and sums over a fixed group of ranks, so that the result would depend on how a batch is cut"
    ): "moe_aux_loss_coeff moe_router_load_balancing_type",
    "decided by engine.z_loss: megatron-core's depends on how a batch is cut": "moe_z_loss_coeff",
    (
        "decided by engine.expert_bias_rate: megatron-core counts padding, and moves the bias before the step"
    ): "moe_router_bias_update_rate moe_router_enable_expert_bias",
    (
        "experts take every token sent to them; with a capacity, which tokens are dropped would depend "
        "on how a batch is cut into micro-batches"
    ): """
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dropping
    """,
    "routes of the same tokens would differ each time they are computed, and with them the log-probs": "moe_input_jitter_eps moe_router_force_load_balancing",
    "decided by engine.replay_routes": "moe_enable_routing_replay",
    "routers score in fp32, whatever model.dtype is": "moe_router_dtype",
    (
        "CUDA graphs are not available in this version: packed rows differ in length from micro-batch to "
        "micro-batch"
    ): """
        enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph cuda_graph_warmup_steps use_te_rng_tracker
    """,
    (
        "communication of tp does not overlap with computing: TransformerEngine's buffers for it have one size, and packed rows differ in length; that "
        "of gradients, parameters and experts does with engine.overlap_grad_reduce, engine.overlap_param_gather and engine.overlap_dispatch"
    ): """
        tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
        tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend overlap_moe_expert_parallel_comm moe_shared_expert_overlap
        delay_wgrad_compute ep_overlap_early_attn_memory_release
    """,
    "tokens are sent by quintet's own dispatcher, once to a rank of their experts as DeepEP and HybridEP do": """
        moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
    """,
    "decided by mtp and the model": "mtp_num_layers mtp_loss_scaling_factor mtp_standalone",
    "of megatron-core's own inference; generating is configured in rollout": """
        flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents
    """,
    "decided by quintet, which trains without dropout so that log-probs can be computed again": "hidden_dropout attention_dropout",
    "decided by algorithm.aggregation": "calculate_per_token_loss",
}
"""Reason → fields; for others that are a key of the recipe by another name, `WORDS` has that."""

_REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}

FREE = frozenset(
    {
        "clone_scatter_output_in_embedding",
        "deterministic_mode",
        "disable_bf16_reduced_precision_matmul",
        "moe_permute_fusion",
        "moe_router_fusion",
    }
)
"""What `engine.megatron` may set: fields that change how fast or in what order a model computes, not what."""
PERMUTATION = "moe_permute_fusion"
"""The kernels that put tokens in the order of their experts and add up what comes back, in one order; without them a GPU adds in any."""
FUSED_EXPERTS = (PERMUTATION, "moe_router_fusion")
"""Of these, those that run kernels of TransformerEngine's on models with experts; where the recipe says nothing of one, a run takes it
where it was measured faster (`quintet.plan.kernels`)."""
TORCH_EXPERTS = "torch_experts"
"""engine.experts=torch, as the choice between kernels names it."""
EXPERT_KERNELS = (*FUSED_EXPERTS, TORCH_EXPERTS)
"""All that runs choose from by what was measured."""


def asks_routers(recipe: Recipe) -> str:
    """Return what of a recipe has the trainer's routers asked for their choice, which TransformerEngine's cannot be; else empty."""
    if recipe.engine.replay_routes is not None:
        return f"engine.replay_routes={recipe.engine.replay_routes}"
    if recipe.rollout.return_routes and recipe.rollout.backend == "native":
        return "rollout.return_routes=true of a native rollout"
    return ""


def why_refused(name: str) -> str:
    """Return why `engine.megatron` may not set a field that is not `FREE`: what decides it, or what to do instead."""
    key = WORDS.get(name)
    return _REFUSED.get(name) or (
        f"decided by {key}"
        if key
        else "decided by the model, by other keys of the recipe or by quintet's own layers"
    )


def instead(name: str) -> str | None:
    """Return what to say of a field, or another trainer's key, that no recipe has by this name: the key that sets it, or what is done
    in its place; None of other names."""
    if name in FREE:
        return f"in quintet it is engine.megatron.{name}"
    return _REFUSED.get(name) or INSTEAD.get(name)


@functools.cache
def transformer_config_fields() -> frozenset[str]:
    """Return the names of TransformerConfig's fields, from the source of the installed megatron-core; empty if it is not found."""
    classes = {
        "ModelParallelConfig": "model_parallel_config.py",
        "TransformerConfig": "transformer/transformer_config.py",
        "MLATransformerConfig": "transformer/transformer_config.py",
    }
    found = (declared_fields("megatron", f"core/{file}", name) for name, file in classes.items())
    return frozenset().union(*(names for names in found if names))
