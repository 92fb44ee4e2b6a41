"""Each rule across fields: a recipe that breaks it, and what the user is told."""

import ast
import json
from pathlib import Path

import pytest

from quintet.recipe.features import (
    FEATURES,
    NEEDS_GPU,
    NOT_AVAILABLE,
    REFUSED_PAIRS,
    features_on,
    refused_pair,
)
from quintet.recipe.keys import all_keys
from quintet.recipe.megatron import FREE, REFUSED, transformer_config_fields
from quintet.recipe.rules import RULES, shape_of
from tests.models.directory import QWEN3, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face directory as far as the rules look."""
    directory = write_model(tmp_path / "model")
    (directory / "tokenizer.json").touch()
    return directory


OWN = "rollout.layout.tp=1"
"""A layout of the rollout's own, which the axes beyond tp, sp and pp need."""

# rule → overrides of a valid recipe that break it → parts of the message
BROKEN = [
    ("only_available_features", ["rollout.layout.ep=2"], ["expert parallelism in the rollout"]),
    (
        "only_available_features",
        ["rollout.backend=vllm"],
        ["vLLM rollout is not available", "rollout.backend=native"],
    ),
    ("only_available_features", ["rollout.backend=sglang"], ["SGLang rollout is not available"]),
    (
        "only_available_features",
        ["optimizer.name=muon"],
        ["Muon is not available", "use adamw", "refuses the distributed optimizer"],
    ),
    ("only_available_features", ["sft.optimizer.name=muon"], ["Muon is not available"]),
    (
        "features_go_together",
        ["cluster.ranks=4", "layout.tp=2", "layout.cp=2"],
        [
            "layout.cp (context parallelism by all-gather) does not go with rollout.layout",
            "set rollout.layout.tp=2",
        ],
    ),
    (
        "features_go_together",
        ["cluster.ranks=2", "layout.cp=2", "engine.cp_comm=all_to_all"],
        ["context parallelism by all-to-all", "rollout.layout.tp=1"],
    ),
    (
        "features_go_together",
        ["@moe", "cluster.ranks=2", "layout.ep=2"],
        ["layout.ep (expert parallelism)", "rollout.layout.tp=1"],
    ),
    (
        "features_go_together",
        ["@moe", "cluster.ranks=4", "layout.tp=2", "layout.sp=true", "layout.ep=2", "layout.etp=1"],
        ["layout.etp (experts cut otherwise than the rest of the model)"],
    ),
    (
        "features_go_together",
        ["cluster.ranks=2", "layout.pp=2", "layout.vpp=2"],
        ["layout.vpp (the interleaved pipeline)", "resharded after each step"],
    ),
    (
        "features_go_together",
        ["engine.offload_params=1.0"],
        ["offload of parameters", "would be away", "or engine.offload_params=0"],
    ),
    (
        "features_go_together",
        ["optimizer.name=adam", "optimizer.cpu_fraction=0.5"],
        ["megatron-core updates adamw alone on the CPU", "use adamw"],
    ),
    (
        "features_go_together",
        ["sft.optimizer.name=sgd"],
        ["optimizer.name (SGD) does not go with", "engine.distributed_optimizer=false"],
    ),
    (
        "features_go_together",
        ["optimizer.name=sgd", "engine.distributed_optimizer=false", "optimizer.cpu_fraction=0.5"],
        ["optimizer.name (SGD) does not go with optimizer.cpu_fraction"],
    ),
    (
        "features_go_together",
        ["engine.distributed_optimizer=false", "optimizer.cpu_fraction=0.5"],
        ["whole on each data-parallel rank", "engine.distributed_optimizer=true"],
    ),
    (
        "features_go_together",
        ["model.dtype=fp32", "optimizer.cpu_fraction=0.5"],
        ["model.dtype (fp32) does not go with optimizer.cpu_fraction", "model.dtype=bf16"],
    ),
    (
        "devices_suffice",
        ["cluster.device=cpu", "engine.backend=transformer_engine"],
        ["needs GPUs: TransformerEngine runs on CUDA alone", "engine.backend=portable"],
    ),
    (
        "devices_suffice",
        ["cluster.device=cpu", "sft.optimizer.cpu_fraction=1.0"],
        ["optimizer.cpu_fraction (optimizer state on the CPU) needs GPUs", "set cpu_fraction=0"],
    ),
    ("megatron_options_are_free", ["engine.megatron.sequence_parallel=true"], ["decided by layout.sp"]),
    ("megatron_options_are_free", ["engine.megatron.attention_dropout=0.1"], ["trains without dropout"]),
    ("megatron_options_are_free", ["engine.megatron.num_moe_experts=8"], ["decided by the model"]),
    (
        "megatron_options_are_free",
        ["engine.megatron.fp8=hybrid"],
        ["FP8 and FP4 are not available", "ignore the field without a word"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.batch_p2p_comm=true"],
        ["decided by layout.vpp", "wrong gradients, without a word"],
    ),
    ("megatron_options_are_free", ["engine.megatron.overlap_p2p_comm=false"], ["decided by layout.vpp"]),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_aux_loss_coeff=0.01"],
        ["router balancing is not available", "counts padding", "how a batch is cut"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_z_loss_coeff=0.001"],
        ["router balancing is not available"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_router_load_balancing_type=seq_aux_loss"],
        ["router balancing is not available"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_router_bias_update_rate=0.001"],
        ["router balancing is not available"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_expert_capacity_factor=1.5"],
        ["which tokens are dropped would depend"],
    ),
    ("megatron_options_are_free", ["engine.megatron.mtp_num_layers=1"], ["multi-token prediction is not"]),
    ("megatron_options_are_free", ["engine.megatron.multi_latent_attention=true"], ["decided by the model"]),
    ("megatron_options_are_free", ["engine.megatron.kv_lora_rank=8"], ["decided by the model"]),
    (
        "megatron_options_are_free",
        ["engine.megatron.recompute_granularity=full"],
        ["decided by engine.recompute and engine.recompute_modules"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.cuda_graph_impl=local"],
        ["CUDA graphs are not available"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.enable_cuda_graph=true"],
        ["CUDA graphs are not available"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.hybrid_context_parallel=true"],
        ["one context-parallel group", "layout.cp"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.max_seqlen_per_dp_cp_rank=4096"],
        ["engine.tokens_per_microbatch_per_rank"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.cpu_offloading=true"],
        ["activations are not offloaded", "engine.offload_params"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.num_layers_in_first_pipeline_stage=1"],
        ["equally many layers", "layout.pp"],
    ),
    ("megatron_options_are_free", ["engine.megatron.tp_comm_overlap=true"], ["does not set up"]),
    (
        "megatron_options_are_free",
        ["engine.megatron.recompute_granularty=full"],
        ["has no such field; recompute_granularity is decided by engine.recompute"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.deterministic_mod=true"],
        ["has no such field; did you mean deterministic_mode?"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_permute_fusion=true"],
        ["moe_permute_fusion is of experts, and the model has none"],
    ),
    (
        "megatron_options_are_free",
        ["@moe", "engine.megatron.moe_permute_fusion=true", "engine.backend=portable"],
        ["a kernel of TransformerEngine's", "engine.backend=transformer_engine on GPUs"],
    ),
    (
        "recompute_modules_are_there",
        ["engine.recompute_modules=[mlp]"],
        ["engine.recompute_modules=[mlp] is read by engine.recompute=selective alone", "it is none"],
    ),
    (
        "recompute_modules_are_there",
        ["engine.recompute=full", "engine.recompute_modules=[mlp]"],
        ["and it is full"],
    ),
    (
        "recompute_modules_are_there",
        ["engine.recompute=selective", "engine.recompute_modules=[]"],
        ["would compute nothing again"],
    ),
    (
        "recompute_modules_are_there",
        ["engine.recompute=selective", "engine.recompute_modules=[core_attn, moe, mla_up_proj]"],
        ["moe is of experts", "mla_up_proj is of latent attention"],
    ),
    (
        "recompute_modules_are_there",
        ["@moe", "engine.recompute=selective", "engine.recompute_modules=[mlp, shared_experts]"],
        ["mlp is of layers without experts", "shared_experts is of shared experts, and the model has none"],
    ),
    (
        "recompute_modules_are_there",
        ["@mla", "engine.recompute=selective", "engine.recompute_modules=[moe, moe_act, shared_experts]"],
        ["moe_act is part of moe", "shared_experts is part of moe"],
    ),
    (
        "context_communication_is_read",
        ["engine.cp_comm=all_to_all"],
        ["engine.cp_comm=all_to_all is not read while layout.cp=1"],
    ),
    (
        "optimizer_keys_are_read",
        ["optimizer.momentum=0.5"],
        ["optimizer.momentum=0.5 is read by sgd alone, and optimizer.name is adamw"],
    ),
    (
        "optimizer_keys_are_read",
        ["optimizer.name=sgd", "optimizer.beta1=0.8", "optimizer.eps=1e-6"],
        ["optimizer.beta1=0.8 is read by adamw and adam alone", "optimizer.eps=1e-06"],
    ),
    (
        "optimizer_keys_are_read",
        ["sft.optimizer.momentum=0.5"],
        ["sft.optimizer.momentum=0.5 is read by sgd"],
    ),
    (
        "lr_multipliers_match",
        ["optimizer.lr_multipliers={'*.gate.weight': 0.1}"],
        [
            "optimizer.lr_multipliers: no weight is left for '*.gate.weight'",
            "the first one that matches counts",
        ],
    ),
    (
        "lr_multipliers_match",
        ["optimizer.lr_multipliers={'*': 0.5, '*.mlp.*': 0.1}"],
        ["no weight is left for '*.mlp.*'"],
    ),
    (
        "lr_multipliers_match",
        ["sft.optimizer.lr_multipliers={'*.q_proj.weight': 0.1}"],
        ["sft.optimizer.lr_multipliers: model.layers.0.self_attn.q_proj.weight has factor 0.1", "one tensor"],
    ),
    (
        "lr_multipliers_match",
        ["@moe", "optimizer.lr_multipliers={'*.experts.0.*': 0.1}"],
        ["experts.0.gate_proj.weight has factor 0.1", "one tensor"],
    ),
    (
        # Stored and not trained: it has no learning rate.
        "lr_multipliers_match",
        ["@mla", "optimizer.lr_multipliers={'*.e_score_correction_bias': 0.1}"],
        ["no weight is left"],
    ),
    (
        "expert_axes_need_experts",
        ["layout.ep=2", "cluster.ranks=2"],
        ["layout.ep=2: the model has no experts", "set layout.ep=1"],
    ),
    ("expert_axes_need_experts", ["layout.etp=1"], ["layout.etp=1: the model has no experts", "etp=null"]),
    (
        "experts_divide",
        ["@moe", "layout.ep=4", "cluster.ranks=2"],
        ["layout.etp × ep = 1 (null: tp) × 4 = 4 does not divide the 2 ranks of a pipeline stage"],
    ),
    (
        # tp × pp × cp divides the ranks, etp × ep × pp does not.
        "experts_divide",
        ["@moe", "layout.tp=2", "layout.sp=true", "layout.pp=2", "layout.ep=4", "cluster.ranks=8"],
        ["layout.etp × ep = 2 (null: tp) × 4 = 8 does not divide the 4 ranks", "layout.etp=1"],
    ),
    ("experts_divide", ["@moe", "layout.ep=3", "cluster.ranks=3"], ["does not divide the model's 8 experts"]),
    (
        "experts_divide",
        ["@moe", "layout.etp=16", "layout.ep=2", "cluster.ranks=32"],
        ["layout.etp=16 does not divide the 24 units of an expert"],
    ),
    (
        "experts_divide",
        ["@moe", "rollout.layout.tp=16", "cluster.ranks=16"],
        ["rollout.layout.tp=16 does not divide the 24 units of an expert"],
    ),
    (
        "experts_need_sp",
        ["@moe", "layout.tp=2", "cluster.ranks=2"],
        ["layout.tp=2 with layout.sp=false", "set layout.sp=true"],
    ),
    (
        "experts_are_cut_as_the_rest",
        ["@moe", "layout.tp=2", "layout.sp=true", "layout.etp=1", "cluster.ranks=2"],
        [
            "layout.etp=1 with layout.tp=2 and layout.ep=1",
            "wrong gradients of the experts",
            "raise layout.ep",
        ],
    ),
    (
        "exchanged_heads_divide",
        ["layout.cp=2", "layout.tp=2", "engine.cp_comm=all_to_all", "cluster.ranks=4"],
        ["tp × cp = 2 × 2 = 4 does not divide the model's 2", "KV heads", "engine.cp_comm=all_gather"],
    ),
    (
        "exchanged_heads_divide",
        ["@mla", "layout.cp=16", "engine.cp_comm=all_to_all", "cluster.ranks=16"],
        ["does not divide the model's 8", "attention heads"],
    ),
    ("backend_options_are_read", ["rollout.vllm.enforce_eager=true"], ["rollout.vllm has options", "native"]),
    ("backend_options_are_read", ["rollout.sglang.x=1"], ["rollout.sglang has options"]),
    ("one_model", ["model.build=null"], ["no model", "model.path", "model.build"]),
    ("one_model", ["model.path={model}"], ["both model.path and model.build"]),
    (
        "built_model_is_sound",
        ["model.build.heads=4", "model.build.kv_heads=3"],
        ["heads=4 is not divisible by"],
    ),
    ("built_model_is_sound", ["model.build.head_dim=7"], ["head_dim=7 is odd"]),
    ("chat_template_exists", ["model.chat_template=chat.jinja"], ["there is no file chat.jinja"]),
    (
        "ranks_divide",
        ["cluster.ranks=3", "layout.tp=2"],
        ["cluster.ranks=3 is not divisible", "2 × 1 × 1 = 2", "2 or 4"],
    ),
    ("ranks_divide", ["cluster.ranks=2", "rollout.layout.tp=4"], ["rollout.layout.tp × pp", "use 4 ranks"]),
    ("nodes_divide", ["cluster.ranks=3", "cluster.ranks_per_node=2"], ["cluster.ranks_per_node=2"]),
    ("sp_needs_tp", ["layout.sp=true"], ["layout.sp=true needs layout.tp > 1"]),
    ("vpp_needs_pp", ["layout.vpp=2"], ["layout.vpp=2 needs layout.pp > 1"]),
    (
        "model_divides",
        ["layout.tp=4", "cluster.ranks=4"],
        ["layout.tp=4 does not divide the model's 2 KV heads"],
    ),
    ("model_divides", ["layout.tp=8", "cluster.ranks=8"], ["does not divide the model's 4 attention heads"]),
    (
        "model_divides",
        ["layout.tp=2", "cluster.ranks=2", "model.build.ffn_hidden_size=33"],
        ["33 units of its MLP"],
    ),
    (
        "model_divides",
        ["layout.pp=3", "cluster.ranks=3"],
        ["layout.pp=3 does not divide the model's 4 layers"],
    ),
    ("model_divides", ["rollout.layout.tp=4", "cluster.ranks=4"], ["rollout.layout.tp=4 does not divide"]),
    (
        "model_divides",
        ["layout.pp=2", "layout.vpp=4", "cluster.ranks=2"],
        ["layout.pp × vpp = 2 × 4 does not divide the model's 4 layers", "4 divides by 1, 2, 4"],
    ),
    (
        "samples_fit_a_microbatch",
        ["engine.tokens_per_microbatch_per_rank=256"],
        ["= 1024 + 512 = 1536", "256", "must fit"],
    ),
    (
        # 1537 fit, 1536 of them in whole multiples of 2; a sample of 1537 is padded to 1538.
        "samples_fit_a_microbatch",
        [
            "engine.tokens_per_microbatch_per_rank=1537",
            "rollout.max_response_tokens=513",
            "layout.tp=2",
            "layout.sp=true",
            "cluster.ranks=2",
        ],
        ["= 1537 is 1538 with padding to a multiple of 2", "=1537 (1536 in whole multiples of 2)"],
    ),
    (
        # Two ranks share a micro-batch of 2 × 766; the sample of 1533 is padded to whole chunks of both.
        "samples_fit_a_microbatch",
        [
            "engine.tokens_per_microbatch_per_rank=766",
            "rollout.max_response_tokens=509",
            "layout.cp=2",
            "cluster.ranks=2",
            OWN,
        ],
        [
            "= 1533 is 1536 with padding to a multiple of 4",
            "=766 × layout.cp=2",
            "raise the budget or layout.cp",
        ],
    ),
    ("samples_fit_a_microbatch", ["model.build.max_position_embeddings=128"], ["128 positions"]),
    ("groups_have_a_contrast", ["rollout.samples_per_prompt=1"], ["at least 2"]),
    ("groups_have_a_contrast", ["rollout.temperature=0"], ["grpo learns nothing"]),
    (
        "batches_divide",
        ["train.mini_batches_per_step=3"],
        ["prompts_per_step=64 is not divisible by", "=3", "use 63 or 66 prompts"],
    ),
    # 512 samples divide by 512, but a mini-batch takes whole prompts.
    ("batches_divide", ["train.mini_batches_per_step=512"], ["64 is not divisible", "use 512 prompts"]),
    (
        "batches_divide",
        ["cluster.ranks=16", "train.prompts_per_step=1"],
        ["8 samples is smaller than the 16"],
    ),
    ("batches_divide", ["cluster.ranks=2", "sft.samples_per_step=1"], ["sft.samples_per_step=1 is smaller"]),
    ("schedules_are_whole", ["optimizer.decay_steps=5"], ["decay_steps=5 is not read", "constant"]),
    ("schedules_are_whole", ["optimizer.min_lr_ratio=0.1"], ["min_lr_ratio=0.1 is not read"]),
    (
        "schedules_are_whole",
        ["sft.optimizer.schedule=wsd"],
        ["sft.optimizer.schedule=wsd needs sft.optimizer.decay_steps"],
    ),
    (
        "schedules_are_whole",
        ["optimizer.schedule=cosine", "optimizer.warmup_steps=101"],
        ["optimizer.warmup_steps=101 is more than the run's 100 optimizer steps"],
    ),
    (
        "schedules_are_whole",
        ["optimizer.schedule=wsd", "optimizer.warmup_steps=60", "optimizer.decay_steps=50"],
        ["warmup_steps + decay_steps = 60 + 50 = 110 is more than the run's 100"],
    ),
    (
        "schedules_are_whole",
        ["optimizer.warmup_steps=201", "train.mini_batches_per_step=2"],
        ["optimizer.warmup_steps=201 is more than the run's 200"],
    ),
    (
        "kl_is_weighted",
        ["algorithm.kl_estimator=k1"],
        ["kl_estimator=k1 is not read while algorithm.kl_coef=0"],
    ),
    (
        "columns_are_read",
        ["data.prompt_key=question"],
        ["data.prompt_key=question is not read by data.task=addition"],
    ),
    ("columns_are_read", ["data.response_key=solution"], ["data.response_key=solution is not read"]),
    (
        "columns_are_read",
        ["data.task=gsm8k", "data.response_key=solution"],
        ["data.response_key=solution is not read by data.task=gsm8k"],
    ),
    ("data_is_named", ["data.train_path=x.jsonl"], ["data.task=addition makes its own problems"]),
    (
        "data_is_named",
        ["data.task=jsonl"],
        ["data.train_path is not set", "data.eval_path is not set", "train.eval_prompts=0"],
    ),
    (
        "data_is_named",
        ["data.task=gsm8k", "data.train_path=no/x.jsonl"],
        ["there is no file no/x.jsonl (looked in "],
    ),
    (
        "task_options_are_read",
        ["data.task=jsonl", "data.task_options.digits=3"],
        ["data.task=jsonl reads none"],
    ),
    ("system_prompt_needs_chat", ["data.chat=false", "data.system_prompt=Hi"], ["needs data.chat=true"]),
    ("reward_is_there", ["reward.function=mth"], ["reward.function=mth: expected math"]),
    ("reward_is_there", ["reward.function=my/reward.py:score"], ["there is no file my/reward.py"]),
    ("run_name_is_a_name", ["run.name=a/b"], ["run.name='a/b'"]),
    (
        "evaluations_have_prompts",
        ["train.eval_every_steps=5", "train.eval_prompts=0"],
        ["needs train.eval_prompts > 0"],
    ),
]


def named(overrides: list[str], models: dict[str, list[str]]) -> list[str]:
    """Overrides with "@moe" replaced by those that name that model."""
    return [one for given in overrides for one in (models[given[1:]] if given[0] == "@" else [given])]


@pytest.mark.parametrize(
    ("rule", "overrides", "said"), BROKEN, ids=[f"{row[0]}:{row[1][0]}" for row in BROKEN]
)
def test_a_broken_rule_is_told_with_its_keys(
    refuse, model, models, rule: str, overrides: list[str], said: list[str]
) -> None:
    message = refuse(*(one.replace("{model}", str(model)) for one in named(overrides, models)))
    for part in said:
        assert part in message
    assert 'override "' in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.ranks=2"],
        ["cluster.ranks=2", "layout.tp=2", "layout.sp=true", "rollout.layout.tp=1"],
        ["cluster.ranks=4", "layout.tp=2", "layout.pp=2", "rollout.layout.pp=2"],
        ["optimizer.schedule=cosine", "optimizer.warmup_steps=10", "optimizer.min_lr_ratio=0.1"],
        ["optimizer.schedule=wsd", "optimizer.decay_steps=20"],
        ["optimizer.warmup_steps=100"],
        ["train.mini_batches_per_step=4"],
        ["algorithm.kl_estimator=k1", "algorithm.kl_coef=0.1"],
        [
            "algorithm.kl_estimator=k3",
            "data.prompt_key=prompt",
        ],  # the defaults, as a resolved recipe has them
        ["engine.tokens_per_microbatch_per_rank=1537", "rollout.max_response_tokens=513"],
        ["engine.megatron.deterministic_mode=true"],
        ["engine.recompute=full", "cluster.device=cpu"],
        ["engine.recompute=selective", "engine.recompute_modules=[core_attn, mlp, layernorm]"],
        ["@moe", "engine.recompute=selective", "engine.recompute_modules=[core_attn, moe_act]"],
        ["@moe", "engine.recompute=selective", "engine.recompute_modules=[core_attn, moe]"],
        ["@mla", "engine.recompute=selective", "engine.recompute_modules=[mlp, shared_experts, mla_up_proj]"],
        ["@moe", "engine.megatron.moe_permute_fusion=true"],
        ["engine.offload_params=0.5", "cluster.ranks=2", "layout.tp=2", "rollout.layout.tp=1"],
        ["engine.offload_grads=1.0", "engine.offload_optimizer=0.5"],
        ["optimizer.name=sgd", "optimizer.momentum=0.8", "engine.distributed_optimizer=false"],
        ["optimizer.name=adam", "optimizer.weight_decay=0.1"],
        ["optimizer.cpu_fraction=0.5"],
        ["optimizer.lr_multipliers={'*.self_attn.*_proj.*': 0.1, 'lm_head.*': 2.0, '*': 0.5}", "@moe"],
        ["reward.function=my_package.rewards:score"],
        ["model.chat_template='{{ messages }}'"],
        ["data.task_options.digits=3"],
        ["data.task=gsm8k", "data.train_path=openai/gsm8k:main:train", "data.eval_path=openai/gsm8k"],
    ],
)
def test_good_recipes_pass(load, models, overrides: list[str]) -> None:
    load(*named(overrides, models))


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.ranks=4", "layout.cp=2", OWN],
        # Two ranks hold together what one could not.
        ["cluster.ranks=2", "layout.cp=2", OWN, "engine.tokens_per_microbatch_per_rank=768"],
        ["cluster.ranks=2", "layout.cp=2", "engine.cp_comm=all_to_all", OWN],
        ["cluster.ranks=2", "layout.pp=2", "layout.vpp=2", OWN],
        ["cluster.ranks=2", "layout.pp=2", "layout.vpp=2", "rollout.layout.pp=2"],
        ["@moe", "cluster.ranks=4", "layout.ep=4", OWN],
        ["@moe", "cluster.ranks=4", "layout.tp=2", "layout.sp=true", "layout.ep=2", OWN],
        ["@moe", "cluster.ranks=4", "layout.tp=2", "layout.sp=true", "layout.ep=4", "layout.etp=1", OWN],
        ["@moe", "cluster.ranks=8", "layout.tp=4", "layout.sp=true", "layout.ep=4", "layout.etp=2", OWN],
        # Every layer has experts: the width of dense MLPs, 96, is not there to be divided.
        ["@moe", "cluster.ranks=8", "layout.tp=4", "layout.sp=true", OWN],
        ["@mla", "cluster.ranks=8", "layout.tp=8", "layout.sp=true", OWN],
        ["@mla", "cluster.ranks=8", "layout.cp=8", "engine.cp_comm=all_to_all", OWN],
        ["@mla", "cluster.ranks=4", "layout.pp=2", "layout.vpp=2", "layout.ep=2", OWN],
    ],
)
def test_good_layouts_pass(load, models, overrides: list[str]) -> None:
    load(*named(overrides, models))


def test_sft_has_no_rollout_to_share_weights_with(load) -> None:
    load("cluster.ranks=2", "layout.cp=2", "sft={}", command="sft")


def test_a_command_is_asked_only_for_what_it_reads(load, refuse) -> None:
    assert "needs an sft section" in refuse(command="sft")
    load("sft={}", "rollout.samples_per_prompt=1", command="sft")
    load("data.task=jsonl", "rollout.temperature=0", command="generate")
    assert "data.eval_path is not set" in refuse("data.task=jsonl", command="eval")


def test_a_model_directory_is_looked_at_before_anything_starts(load, refuse, model: Path) -> None:
    named = ["model.build=null", f"model.path={model}"]
    load(*named, "cluster.ranks=2", "layout.tp=2")
    assert "does not divide the model's 2 KV heads" in refuse(*named, "cluster.ranks=4", "layout.tp=4")
    assert "does not divide the model's 6 layers" in refuse(*named, "cluster.ranks=4", "layout.pp=4")
    assert "2048 positions" in refuse(*named, "rollout.max_response_tokens=2000")
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer" in refuse(*named)
    (model / "tokenizer.json").touch()
    load(*named, "rollout.stop_token_ids=[0, 99]")
    assert "100 is never generated, the model has token ids 0 to 99" in refuse(
        *named, "rollout.stop_token_ids=[99, 100]"
    )
    (model / "config.json").write_text(json.dumps(QWEN3 | {"intermediate_size": 80}))
    assert "has shape (96, 64), config.json implies (80, 64)" in refuse(*named)
    (model / "config.json").write_text(json.dumps(QWEN3))
    (model / "model.safetensors").unlink()
    assert "has no *.safetensors" in refuse(*named)
    (model / "config.json").write_text(json.dumps(QWEN3 | {"architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM is not supported" in refuse(*named)
    (model / "config.json").write_text("{")
    assert "not valid JSON" in refuse(*named)
    (model / "config.json").unlink()
    assert "config.json does not exist" in refuse(*named)


def test_a_missing_tracker_names_the_extra(refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'quintet[wandb]'" in refuse("run.trackers=[wandb]")


def test_a_missing_transformer_engine_is_told(load, refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "engine.backend=transformer_engine"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "TransformerEngine is not installed here" in refuse(asked)
    load(asked, "cluster.address=ray://elsewhere:10001")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    load(asked)


def test_every_rule_has_a_sentence_and_a_test() -> None:
    tested_below = {
        "weights_are_there",
        "stop_tokens_exist",
        "trackers_are_installed",
        "sft_has_its_section",
        "layers_are_installed",
    }
    assert {one.__name__ for one in RULES} == {row[0] for row in BROKEN} | tested_below
    assert all((one.__doc__ or "").endswith(".") for one in RULES)


def test_features_name_their_keys() -> None:
    features = [*FEATURES.values(), *(missing.feature for missing in NOT_AVAILABLE)]
    assert {key for one in features for key in one.keys} <= set(all_keys())
    assert {need for one in features for need in one.needs} <= FEATURES.keys()
    assert {need.feature for need in NEEDS_GPU} <= FEATURES.keys()


def test_every_refused_pair_is_of_two_features_and_is_refused(refuse, models) -> None:
    """Both ways round, by a sentence that names both keys; and a recipe of `BROKEN` has each."""
    refused = "\n".join(
        refuse(*named(overrides, models)) for rule, overrides, _ in BROKEN if rule == "features_go_together"
    )
    for pair in REFUSED_PAIRS:
        a, b = FEATURES[pair.first], FEATURES[pair.second]
        sentence = refused_pair(a.id, b.id)
        assert sentence == refused_pair(b.id, a.id) == pair.sentence()
        assert a.key in sentence
        assert b.key in sentence
        assert f"{a.key} ({a.name}) does not go with {b.key} ({b.name}): " in refused
    assert refused_pair("tp", "pp") is None
    assert refused_pair("tp", "tp") is None
    assert "two values of engine.recompute" in str(refused_pair("recompute_full", "recompute_selective"))


def test_features_are_told_from_a_recipe(load, models) -> None:
    assert features_on(load()) == {"distributed_optimizer", "shared_rollout"}
    assert {"tied"} < features_on(load(), shape_of(load()))
    recipe = load(*models["moe"], "cluster.ranks=4", "layout.tp=2", "layout.sp=true", OWN, "model.dtype=bf16")
    assert features_on(recipe, shape_of(recipe)) == {
        *("dp", "tp", "sp", "etp", "experts", "bf16", "distributed_optimizer", "own_rollout")
    }


def test_every_field_of_megatron_core_is_judged() -> None:
    """None is left that a recipe could set without anyone having asked what it does here."""
    assert transformer_config_fields() == REFUSED.keys() | FREE
    assert not REFUSED.keys() & FREE


def test_engine_megatron_cannot_set_what_the_engine_sets() -> None:
    """Read from the source: the engine's module takes seconds to import."""
    source = Path(__file__).parents[2] / "quintet" / "engine" / "config.py"
    tables = [
        node.value
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict)
    ]
    set_by_engine = {ast.literal_eval(key) for table in tables for key in table.keys if key is not None}
    assert {"num_layers", "recompute_granularity", "kv_lora_rank", "overlap_p2p_comm"} < set_by_engine
    assert set_by_engine <= REFUSED.keys()


@pytest.mark.parametrize("override", ["rollout.stop=['']", "rollout.stop=[a, '']"])
def test_a_stop_text_is_not_empty(refuse, override: str) -> None:
    assert 'is ""; expected a list, each item text of at least 1 character' in refuse(override)


def test_stop_token_ids_are_not_negative(refuse) -> None:
    assert "each item a whole number at least 0" in refuse("rollout.stop_token_ids=[-1]")
