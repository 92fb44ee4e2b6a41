"""Which fields of megatron-core's TransformerConfig `engine.megatron` may set, and why not the others.

Some the engine sets itself, some it could not honour: a field that no layer reads would be ignored without a word, and
some are known to give wrong numbers.

Read without importing megatron-core, which would bring in torch and take seconds. A test holds that no field of the
pinned version is missing here, so that a new version's fields are judged before a recipe can set them.
"""

from __future__ import annotations

import functools

from quintet.recipe.reserved_options import declared_fields

_REASONS = {
    "decided by the model": """
        multi_latent_attention num_moe_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk
        moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_apply_probs_on_input moe_latent_size
        softmax_scale softmax_type window_size window_attn_skip_freq rotary_interleaved no_rope_freq
        mrope_section glu_linear_offset activation_func_clamp_value qk_l2_norm attention_output_gate
        layernorm_zero_centered_gamma apply_residual_connection_post_layernorm
        experimental_attention_variant heterogeneous_block_specs is_hybrid_model q_lora_rank kv_lora_rank
        qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent
        rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
        layernorm_epsilon qk_layernorm add_qkv_bias add_bias_linear normalization gated_linear_unit
        activation_func
    """,
    "decided by model.dtype": """
        fp16 enable_autocast autocast_dtype fp32_residual_connection params_dtype pipeline_dtype bf16
    """,
    "decided by quintet: weights are loaded, never drawn by megatron-core": """
        init_method output_layer_init_method init_method_std embedding_init_method embedding_init_method_std
        init_model_with_meta_device perform_initialization
    """,
    "decided by layout.vpp": "virtual_pipeline_model_parallel_size",
    "decided by layout.ep": "expert_model_parallel_size",
    "decided by layout.etp": "expert_tensor_parallel_size moe_extended_tp",
    "decided by engine.cp_comm": "cp_comm_type hierarchical_context_parallel_sizes",
    "decided by engine.backend": "transformer_impl use_te_activation_func",
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
    (
        "FP8 and FP4 are not available in this version, bf16 is (and without TransformerEngine, "
        "megatron-core would ignore the field without a word)"
    ): """
        fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_wgrad
        fp8_amax_history_len fp8_amax_compute_algo fp8_dot_product_attention fp8_multi_head_attention
        tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        use_kitchen use_kitchen_attention kitchen_attention_backend fp4 fp4_recipe fp4_param
        fp4_quantizer_factory activation_func_fp8_input_store quant_recipe
        moe_router_padding_for_quantization moe_router_padding_for_fp8 disable_parameter_transpose_cache
    """,
    (
        "router balancing is not available in this version: megatron-core scales these losses by the "
        "tokens of one rank's micro-batch, counts padding among them and sums over a fixed group of "
        "ranks, so that the result would depend on how a batch is cut"
    ): """
        moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type moe_router_bias_update_rate
    """,
    (
        "experts take every token sent to them; with a capacity, which tokens are dropped would depend "
        "on how a batch is cut into micro-batches"
    ): """
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dropping
    """,
    "routes of the same tokens would differ each time they are computed, and with them the log-probs": "moe_input_jitter_eps moe_router_force_load_balancing",
    "replay of routes is not available in this version": "moe_enable_routing_replay",
    "decided by quintet's own experts and dispatcher": """
        moe_grouped_gemm moe_use_legacy_grouped_gemm moe_enable_deepep moe_flex_dispatcher_backend
        moe_deepep_num_sms moe_hybridep_num_sms moe_router_dtype moe_shared_expert_overlap
        moe_per_layer_logging use_fused_weighted_squared_relu moe_router_fusion
    """,
    (
        "CUDA graphs are not available in this version: packed rows differ in length from micro-batch to "
        "micro-batch"
    ): """
        enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph cuda_graph_warmup_steps use_te_rng_tracker
    """,
    "multi-token prediction is not available in this version": "mtp_num_layers mtp_loss_scaling_factor mtp_standalone",
    (
        "micro-batches share one context-parallel group, of layout.cp ranks, in this version; "
        "engine.tokens_per_microbatch_per_rank is their size"
    ): "hybrid_context_parallel max_seqlen_per_dp_cp_rank",
    (
        "pipeline stages hold equally many layers in this version; choose a layout.pp that divides the layers"
    ): """
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    """,
    "quintet's own attention does not read it": """
        attention_backend apply_query_key_layer_scaling attention_softmax_in_fp32 apply_rope_fusion
        fused_single_qkv_rope qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit test_mode
        batch_invariant_mode
    """,
    "needs buffers or a schedule of its own that quintet does not set up": """
        tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
        overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
        symmetric_ar_type
    """,
    "decided by quintet's own head and loss": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute
        wgrad_deferral_limit
    """,
    "of megatron-core's own inference; generating is configured in rollout": """
        flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents
    """,
    "a function that quintet gives": """
        finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func timers
    """,
    "no layer of quintet's models reads it": """
        async_tensor_model_parallel_allreduce barrier_with_L1_time config_logger_dir
        hetereogenous_dist_checkpoint persist_layer_norm memory_efficient_layer_norm dsa_indexer_n_heads
        dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
        linear_num_key_heads linear_num_value_heads mamba_state_dim mamba_head_dim mamba_num_groups
        mamba_num_heads use_mamba_mem_eff_path
    """,
    "decided by quintet, which trains without dropout so that log-probs can be computed again": "hidden_dropout attention_dropout",
    "decided by layout.tp": "tensor_model_parallel_size",
    "decided by layout.pp": "pipeline_model_parallel_size",
    "decided by layout.cp": "context_parallel_size",
    "decided by layout.sp": "sequence_parallel",
    "decided by quintet: packed rows differ in length": "variable_seq_lengths moe_token_dispatcher_type",
    "decided by algorithm.aggregation": "calculate_per_token_loss",
    "decided by the device": "bias_activation_fusion use_cpu_initialization",
    "decided by quintet: its own layers stand where this fusion would be": "bias_dropout_fusion masked_softmax_fusion gradient_accumulation_fusion",
    "decided by quintet, for its pipeline schedule": "deallocate_pipeline_outputs",
}

REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Every field that `engine.megatron` may not set, and why: what the engine sets itself, and what it could not honour."""

FREE = frozenset(
    {
        "clone_scatter_output_in_embedding",
        "deterministic_mode",
        "disable_bf16_reduced_precision_matmul",
        "moe_permute_fusion",
    }
)
"""What `engine.megatron` may set: fields that change how fast or in what order a model computes, not what.
`moe_permute_fusion` runs a kernel of TransformerEngine's, on models with experts."""


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
