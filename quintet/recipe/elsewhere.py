"""What other trainers call quintet's keys: TRL, verl, OpenRLHF, Megatron-LM, peft. For the hint in an error alone; none is accepted."""

from __future__ import annotations

_WORDS = {
    "train.steps": "max_steps num_train_epochs total_epochs total_training_steps num_episodes",
    "train.prompts_per_step": "batch_size train_batch_size rollout_batch_size per_device_train_batch_size generation_batch_size "
    "gen_batch_size",
    "train.mini_batches_per_step": "steps_per_generation ppo_mini_batch_size ppo_epochs num_mini_batches",
    "train.eval_every_steps": "eval_steps eval_freq test_freq eval_interval",
    "train.eval_prompts": "per_device_eval_batch_size val_batch_size",
    "rollout.samples_per_prompt": "num_generations group_size n_samples_per_prompt",
    "rollout.max_response_tokens": "max_new_tokens max_tokens max_completion_length max_response_length generate_max_len response_length",
    "rollout.backend=vllm": "use_vllm",
    "rollout.memory_fraction": "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static",
    "rollout.layout.tp": "vllm_tensor_parallel_size",
    "rollout.sequences_per_rank": "max_num_seqs",
    "optimizer.lr": "learning_rate actor_learning_rate",
    "optimizer.schedule": "lr_scheduler_type lr_decay_style",
    "optimizer.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio lr_warmup_iters",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.name": "optim",
    "optimizer.frozen": "freeze_moe_router moe_router_freeze freeze_router frozen_parameters freeze_params only_train_params_name_list "
    "freeze_params_name_list",
    "optimizer.clip_grad_norm": "max_grad_norm grad_clip",
    "optimizer.min_lr_ratio": "min_lr",
    "optimizer.cpu_fraction": "optimizer_cpu_offload optimizer_offload_fraction",
    "lora.rank": "lora_rank lora_r",
    "lora.alpha": "lora_alpha",
    "lora.targets": "lora_target_modules target_modules",
    "lora.rslora": "use_rslora",
    "lora.path": "peft_path adapter_path",
    "mtp.train": "enable_train enable_mtp_training",
    "mtp.loss_weight": "mtp_loss_scaling_factor",
    "mtp.detach": "detach_encoder",
    "rollout.draft_tokens": "num_speculative_tokens speculative_num_draft_tokens speculative_num_steps speculative_algorithm "
    "speculative_eagle_topk",
    "mtp.init_layers": "mtp_num_layers num_nextn_predict_layers num_mtp_layers",
    "algorithm.name": "adv_estimator advantage_estimator",
    "algorithm.clip_low": "epsilon cliprange clip_ratio clip_ratio_low eps_clip eps_clip_low",
    "algorithm.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "algorithm.aggregation": "loss_type loss_agg_mode",
    "algorithm.normalize_by_std": "scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.kl_coef": "beta init_kl_coef kl_loss_coef",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty",
    "algorithm.kl_in": "use_kl_in_reward use_kl_loss",
    "algorithm.gae_lambda": "lam lambd",
    "algorithm.max_refills": "max_num_gen_batches",
    "critic.path": "critic_pretrain value_model",
    "critic.optimizer.lr": "critic_learning_rate",
    "critic.value_clip": "cliprange_value value_clip_range",
    "critic.warmup_steps": "critic_warmup freezing_actor_steps",
    "reward.function": "reward_funcs reward_function custom_reward_function reward_model",
    "layout.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel",
    "layout.pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel",
    "layout.cp": "context_parallel_size context_parallel",
    "layout.dynamic_cp": "dynamic_context_parallel hybrid_context_parallel",
    "layout.ep": "expert_model_parallel_size expert_parallel_size expert_parallel",
    "layout.vpp": "virtual_pipeline_model_parallel_size",
    "layout.stage_layers": "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split",
    "layout.etp": "expert_tensor_parallel_size",
    "layout.sp": "sequence_parallel",
    "cluster.ranks": "data_parallel_size dp world_size num_gpus gpus nnodes",
    "cluster.ranks_per_node": "n_gpus_per_node gpus_per_node",
    "engine.backend": "transformer_impl",
    "engine.fp8": "fp8_recipe fp8_format fp8_hybrid fp8_e4m3 use_fp8 enable_fp8",
    "engine.distributed_optimizer": "use_distributed_optimizer",
    "engine.recompute": "recompute_granularity recompute_method recompute_num_layers gradient_checkpointing activation_checkpointing "
    "enable_gradient_checkpointing",
    "engine.replay_routes": "router_replay",
    "engine.replay_routes=old": "use_routing_replay enable_routing_replay",
    "engine.replay_routes=rollout": "use_rollout_routing_replay enable_rollout_routing_replay",
    "engine.aux_loss.weight": "moe_aux_loss_coeff moe_aux_loss_coef aux_loss_coef aux_loss_alpha aux_loss_coeff router_aux_loss_coef",
    "engine.aux_loss.per": "moe_router_load_balancing_type",
    "engine.z_loss": "moe_z_loss_coeff router_z_loss_coef z_loss_coeff",
    "engine.expert_bias_rate": "moe_router_bias_update_rate moe_router_enable_expert_bias router_bias_update_rate bias_update_speed",
    "engine.offload_params": "param_offload",
    "engine.offload_grads": "grad_offload",
    "engine.offload_optimizer": "optimizer_offload",
    "engine.tokens_per_microbatch_per_rank": "micro_batch_size gradient_accumulation_steps ppo_max_token_len_per_gpu max_token_len_per_gpu "
    "ppo_micro_batch_size_per_gpu micro_train_batch_size max_seqlen_per_dp_cp_rank",
    "data.train_path": "train_files dataset_name prompt_data train_dataset",
    "data.eval_path": "val_files eval_dataset",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "data.long_prompts=drop": "filter_overlong_prompts",
    "data.long_prompts": "truncation truncate_prompt_tokens truncation_mode",
    "data.chat": "apply_chat_template",
    "model.path": "model_name_or_path pretrain hf_model_path",
    "model.dtype": "bf16 torch_dtype param_dtype fp8_param_gather",
    "run.trackers": "report_to logger use_wandb",
    "run.dir": "output_dir default_local_dir",
    "run.name": "run_name experiment_name project_name",
    "checkpoint.every_steps": "save_steps save_freq save_interval",
    "checkpoint.keep_last": "save_total_limit max_actor_ckpt_to_keep",
    "resume": "resume_from_checkpoint resume_mode resume_from_path",
}
_DOTTED = {
    "rollout.samples_per_prompt": "rollout.n",
    "rollout.backend": "rollout.name",
    "rollout.layout.tp": "rollout.tensor_model_parallel_size rollout.tensor_parallel_size",
    "optimizer.lr": "actor.optim.lr optim.lr",
    "optimizer.weight_decay": "actor.optim.weight_decay optim.weight_decay",
    "critic.optimizer.lr": "critic.optim.lr",
    "critic.optimizer.weight_decay": "critic.optim.weight_decay",
    "critic.path": "critic.model.path",
    "model.path": "actor.model.path model.name model.name_or_path",
    "algorithm.kl_coef": "kl_ctrl.kl_coef algorithm.kl_ctrl.kl_coef",
    "algorithm.name=dapo": "algorithm.filter_groups filter_groups.enable",
    "lora.rank": "lora.r",
    "reward.overlong_tokens": "overlong_buffer.len",
    "reward.overlong_penalty": "overlong_buffer.penalty_factor",
    "reward.function": "custom_reward_function.path custom_reward_function.name",
    "mtp={}": "mtp.enable mtp.enabled",
    "rollout.quantization=fp8": "rollout.fp8",
    "rollout.quantization": "quantization_config.method quantization_config.quant_method",
    "engine.fp8": "fp8",
    "rollout.draft_tokens": "mtp.enable_rollout mtp.method rollout.speculative_config.method",
    "engine.replay_routes": "router_replay.mode actor.router_replay.mode megatron.router_replay.mode",
}
"""Words that mean this only where they stand so."""
VALUES = {
    "algorithm.name": {"gae": "ppo"},
    "engine.replay_routes": {"R2": "old", "R3": "rollout", "disabled": "null"},
    "engine.fp8": {"hybrid": "tensorwise", "e4m3": "blockwise"},
    "engine.aux_loss.per": {"seq_aux_loss": "sequence", "global_aux_loss": "batch"},
    "model.dtype": {"bfloat16": "bf16", "float32": "fp32", "fp8": "bf16 with engine.fp8"},
}
"""Key → what others call its values."""


def _turned(table: dict[str, str]) -> dict[str, str]:
    return {name: key for key, names in table.items() for name in names.split()}


WORDS, DOTTED = _turned(_WORDS), _turned(_DOTTED)
"""Name elsewhere → the key, or the key and its value."""
INSTEAD = _turned(
    {
        "the optimizer's state is fp32; optimizer.cpu_fraction keeps it in host memory": "use_precision_aware_optimizer",
        "model.path reads Hugging Face's weights, which `quintet convert` makes of torch_dist's": "use_dist_checkpointing dist_checkpointing_path",
        "rollout.vllm takes it, as it does all options of vLLM's engine": "enforce_eager enable_chunked_prefill max_num_batched_tokens",
    }
)
"""Name elsewhere → what is done here in its place. `recipe.megatron` has that for the fields of megatron-core's TransformerConfig."""


def dotted_elsewhere(unknown: str) -> str | None:
    """Return what a dotted name means here by its end, "rollout.samples_per_prompt" of "actor_rollout_ref.rollout.n"."""
    parts = unknown.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((DOTTED[end] for end in ends if end in DOTTED), None)


def is_elsewhere(unknown: str) -> bool:
    """Return whether another trainer has a key of this name."""
    return dotted_elsewhere(unknown) is not None or unknown.rpartition(".")[2] in WORDS
