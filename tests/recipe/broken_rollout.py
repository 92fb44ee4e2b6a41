"""Recipes that break a rule of where rollouts run: data for test_rules.py."""

SEPARATE = ["rollout.placement=separate", "rollout.ranks=2"]

ALONE = ["rollout.backend=vllm", "rollout.adapter_sync=separate"]

MIMO = ["model.build.family=mimo", "mtp.init_layers=1", "rollout.backend=vllm"]
_MANY = ["model.build.family=mimo", "mtp.init_layers=2", "rollout.backend=vllm"]
_ROUTES = ["rollout.return_routes=true", "engine.replay_routes=rollout"]
_NOT = [
    (["rollout.layout.pp=2", "rollout.draft_tokens=1", "cluster.ranks=2"], "no embedding on the last stage"),
    (
        ["rollout.quantization=fp8", "rollout.draft_tokens=1"],
        "does not reach vLLM's drafter, whose weights stay in 16 bits",
    ),
    (
        ["rollout.vllm.hf_overrides={rope_theta: 2}", "rollout.draft_tokens=1"],
        "write them into the model's config.json",
    ),
    (
        ["rollout.vllm.speculative_config={method: ngram}", "rollout.draft_tokens=1"],
        "names another; remove one of them",
    ),
    (["rollout.draft_tokens=1", "rollout.min_p=0.1"], "vLLM drafts without min_p"),
    (["rollout.draft_tokens=1", "rollout.sync_proof=false"], "nothing would tell of layers that draft"),
    (
        ["rollout.draft_tokens=auto", "rollout.temperature=0.7"],
        "draft_tokens=auto: rollout.temperature=0.7: log-probs",
    ),
    (
        ["rollout.draft_tokens=1", "lora.rank=4", "mtp.train=false", "rollout.adapter_sync=separate"],
        "the drafter would get no weights",
    ),
]
"""Of a model that could draft: what it cannot draft with, and what is said."""
DRAFTS = [
    (
        "drafts_can_be_made",
        ["rollout.draft_tokens=1"],
        ["rollout.draft_tokens=1: native rollouts do not draft"],
    ),
    (
        "drafts_can_be_made",
        ["rollout.draft_tokens=auto", "rollout.backend=sglang", "cluster.device=cuda"],
        ["rollout.draft_tokens=auto: SGLang"],
    ),
    (
        "drafts_can_be_made",
        ["rollout.draft_tokens=1", "rollout.backend=vllm"],
        ["none are known of the family qwen3", "deepseek_v3, glm4_moe, mimo", "or draft_tokens=0"],
    ),
    (
        "drafts_can_be_made",
        ["rollout.draft_tokens=1", "rollout.backend=vllm", "model.build.family=mimo"],
        ["without the section mtp a run keeps none", "or draft_tokens=0"],
    ),
    (
        "drafts_can_be_made",
        ["@mla", "mtp.init_layers=1", "rollout.backend=vllm", "rollout.draft_tokens=1", *_ROUTES],
        ["that vLLM tells the routes of tokens that it drafted was never seen"],
    ),
    (
        "drafts_can_be_made",
        ["rollout.draft_tokens=3", *_MANY],
        ["vLLM drafts 1, 2, 4, 6, 8 tokens, and no other"],
    ),
    *(("drafts_can_be_made", [*overrides, *MIMO], [said]) for overrides, said in _NOT),
]
"""Recipes whose model cannot draft for itself."""

# rule → overrides of a valid recipe that break it ("@moe" names a model) → parts of the message
BROKEN_ROLLOUT: list[tuple[str, list[str], list[str]]] = [
    *DRAFTS,
    *(
        ("rollouts_read_no_eight_bits", ["@fp8", *others], ["its weights are in 8 bits", said])
        for others, said in (
            (["rollout.backend=sglang", "cluster.device=cuda"], "SGLang would be started for 8 bits"),
            (["rollout.backend=vllm", "rollout.vllm.load_format=auto"], "vLLM loads none of them"),
            (
                ["rollout.backend=vllm", "rollout.draft_tokens=1"],
                "vLLM's drafter would be started for 8 bits",
            ),
        )
    ),
    (
        "separate_rollouts_have_devices",
        ["rollout.ranks=2"],
        ["rollout.ranks=2 is not read by a colocated rollout", "rollout.placement=separate"],
    ),
    (
        "separate_rollouts_have_devices",
        ["rollout.placement=separate"],
        ["rollout.placement=separate needs rollout.ranks"],
    ),
    (
        "separate_rollouts_have_devices",
        ["rollout.placement=separate", "rollout.ranks=3", "rollout.layout.tp=2"],
        ["rollout.ranks=3 is not divisible by rollout.layout.tp × pp = 2"],
    ),
    (
        "own_processes_are_chosen_once",
        ["rollout.own_processes=true", "rollout.backend=vllm"],
        ["rollout.own_processes=true is of the native rollout: vllm always has processes of its own"],
    ),
    (
        "own_processes_are_chosen_once",
        ["rollout.own_processes=true", *SEPARATE],
        ["says nothing of a separate rollout"],
    ),
    (
        "awake_rollouts_are_vllms",
        ["rollout.sleep_level=0", "rollout.own_processes=true"],
        ["rollout.sleep_level=0 is of vllm: native takes new weights with its KV cache asleep"],
    ),
    (
        "restart_needs_own_processes",
        ["rollout.restart=true"],
        ["dies with it", "`resume=auto` goes on from the last checkpoint", "rollout.own_processes=true"],
    ),
    (
        "restart_needs_own_processes",
        ["rollout.restart=true", "rollout.layout.tp=1", "layout.tp=2", "cluster.ranks=2"],
        ["rollout.restart=true needs a rollout in processes of its own"],
    ),
    (
        "keys_are_read",
        ["rollout.sleep_level=1", *SEPARATE],
        ["rollout.sleep_level=1 is not read by a separate rollout, which keeps its weights"],
    ),
    (
        "keys_are_read",
        ["rollout.sleep_level=1"],
        ["rollout.sleep_level=1 is not read by a rollout on the engine's own parameters"],
    ),
    (
        "keys_are_read",
        ["rollout.sleep_level=1", "rollout.own_processes=true", "lora.rank=4"],
        ["by a rollout that gets adapters alone in any case"],
    ),
    (
        "adapters_travel_as_asked",
        ["rollout.adapter_sync=separate", "rollout.backend=vllm"],
        ["rollout.adapter_sync=separate is not read without adapters", "lora.rank"],
    ),
    (
        "adapters_travel_as_asked",
        ["rollout.adapter_sync=merged", "lora.rank=4"],
        ["rollout.adapter_sync=merged is of vllm: native gets adapters alone in any case"],
    ),
    (
        "adapters_travel_as_asked",
        ["rollout.adapter_sync=separate", "lora.rank=4", "rollout.backend=sglang"],
        ["sglang gets merged weights in any case"],
    ),
    (
        "adapters_travel_as_asked",
        [*ALONE, "lora.rank=4", "rollout.quantization=fp8", "cluster.device=cuda"],
        [
            "rollout.adapter_sync=separate: rollout.quantization=fp8 quantises what is sent",
            "rollout.adapter_sync=merged",
        ],
    ),
    (
        "adapters_travel_as_asked",
        [*ALONE, "lora.rank=4", "rollout.vllm.load_format=dummy"],
        ["vLLM reads the frozen weights from the model's directory"],
    ),
    (
        "adapters_travel_as_asked",
        [*ALONE, "lora.rank=1000"],
        ["vLLM has adapters of rank 512 at most, and these have 1000"],
    ),
    (
        "adapters_travel_as_asked",
        ["@moe", *ALONE, "lora.targets=[q_proj]"],
        ["vLLM's adapters are tried with the families llama, qwen2, qwen3, and this model is of"],
    ),
    (
        "keys_are_read",
        ["rollout.bucket_mib=64"],
        ["rollout.bucket_mib=64 is not read by", "nothing travels"],
    ),
    ("keys_are_read", ["rollout.sync_proof=false"], ["rollout.sync_proof=false is not read by"]),
    (
        "keys_are_read",
        ["rollout.probe_tolerance=0.1", "rollout.own_processes=true"],
        ["rollout.probe_tolerance=0.1 is not read by the native rollout"],
    ),
    (
        "keys_are_read",
        ["rollout.probe_tolerance=0.1", "rollout.backend=vllm", "rollout.sync_proof=false"],
        ["rollout.probe_tolerance=0.1 is not read with rollout.sync_proof=false"],
    ),
    (
        "temperatures_are_told_apart",
        ["rollout.temperature=0.001"],
        ["rollout.temperature=0.001", "would sample at that"],
    ),
    (
        "temperatures_are_told_apart",
        ["rollout.temperature=0", "rollout.top_k=5", "rollout.min_p=0.1"],
        [
            "rollout.top_k=5 is not read with rollout.temperature=0",
            "which takes the likeliest token",
            "rollout.min_p=0.1 is not read",
        ],
    ),
    (
        "keys_are_read",
        ["rollout.mode=server"],
        ["rollout.mode=server is not read by the native rollout, but by vllm"],
    ),
    ("keys_are_read", ["rollout.quantization=fp8"], ["but by vllm"]),
    (
        "keys_are_read",
        ["rollout.memory_fraction=0.7"],
        ["but by vllm and sglang"],
    ),
    ("routes_can_be_replayed", ["@dense", "engine.replay_routes=old"], ["the model has no experts"]),
    (
        "routes_can_be_replayed",
        ["@moe", "engine.replay_routes=rollout"],
        ["with rollout.return_routes=true alone", "or engine.replay_routes=null"],
    ),
    (
        "routes_can_be_replayed",
        ["@moe", "engine.replay_routes=old", "train.mini_batches_per_step=1"],
        ["engine.replay_routes=old with train.mini_batches_per_step=1", "set engine.replay_routes=rollout"],
    ),
    (
        "megatron_options_are_free",
        ["@moe", "engine.megatron.moe_enable_routing_replay=true"],
        ["decided by engine.replay_routes"],
    ),
    ("routes_need_experts", ["@dense", "rollout.return_routes=true"], ["the model has no experts"]),
    (
        "routes_are_kept",
        ["@moe", "rollout.return_routes=true", "mismatch.replay_samples_per_step=0"],
        ["rollout.return_routes=true is not read with mismatch.replay_samples_per_step=0"],
    ),
    (
        "features_go_together",
        ["engine.offload_optimizer=1.0", *SEPARATE],
        [
            "engine.offload_optimizer (offload of optimizer state) does not go with rollout.placement",
            "keep their devices",
        ],
    ),
    ("features_go_together", ["engine.offload_params=1.0", *SEPARATE], ["offload of parameters"]),
    ("features_go_together", ["engine.offload_grads=1.0", *SEPARATE], ["offload of gradients"]),
    (
        "devices_suffice",
        ["rollout.backend=vllm", "rollout.quantization=fp8", "cluster.device=cpu"],
        ["rollout.quantization (an 8-bit rollout) needs GPUs"],
    ),
    (
        "ranks_divide",
        ["rollout.own_processes=true", "rollout.layout.tp=2", "cluster.ranks=3"],
        ["cluster.ranks=3 is not divisible by rollout.layout.tp × pp = 2 × 1 = 2"],
    ),
]
