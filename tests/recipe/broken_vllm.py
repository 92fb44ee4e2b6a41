"""Recipes that ask vLLM for what it cannot do: rule → overrides of a valid recipe → parts of the message."""

V = "rollout.backend=vllm"
BROKEN_VLLM = [
    (
        "vllm_reads_a_bias_of_experts",
        [V, "@mla"],
        ["its config.json names no topk_method", 'add "topk_method": "noaux_tc" there'],
    ),
    (
        "vllm_can_do_it",
        [V, "@sinks-limit"],
        ["vLLM (0.20.2, 0.32.0) has swiglu_alpha=1.702, swiglu_limit=7", "use native"],
    ),
    (
        "vllm_can_do_it",
        [
            V,
            "model.build.family=mimo",
            "model.build.hidden_size=64",
            "model.build.heads=2",
            "model.build.kv_heads=1",
            "model.build.head_dim=64",
        ],
        [
            "vLLM has heads of hidden_size / heads = 32 in models of mimo, and these have 64",
            "model.build.head_dim=32",
        ],
    ),
    ("vllm_can_do_it", [V, "@qwen2-wide"], ["heads = 8 in models of qwen2, and these have 16"]),
    (
        "vllm_can_do_it",
        [V, "rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.top_k=5"],
        ["rollout.top_p=0.9 and rollout.top_k=5 with rollout.temperature=0.7", "use rollout.temperature=1"],
    ),
    (
        "vllm_can_do_it",
        [V, "rollout.top_p=0.9", "rollout.min_p=0.1"],
        ["rollout.min_p=0.1 with rollout.top_p=0.9", "by min_p first"],
    ),
    (
        "vllm_can_do_it",
        [V, "rollout.min_p=0.1", "rollout.vllm.speculative_config={method: ngram}"],
        ["speculative_config with rollout.min_p=0.1: vLLM drafts without min_p"],
    ),
    (
        "vllm_can_do_it",
        [V, "rollout.vllm={enable_eplb: true, override_generation_config: {temperature: 2}}"],
        [
            "rollout.vllm.enable_eplb: experts stay",
            "rollout.vllm.override_generation_config: the sampling is in rollout; remove it",
        ],
    ),
    (
        "vllm_can_do_it",
        [V, "rollout.vllm.trust_remote_code=true"],
        ["rollout.vllm.trust_remote_code: it is model.trust_remote_code; remove it"],
    ),
    (
        "vllm_can_do_it",
        [V, "cluster.device=cpu", "rollout.vllm.enable_chunked_prefill=true"],
        ["rollout.vllm.enable_chunked_prefill=true: of a prompt"],
    ),
    (
        "vllm_can_do_it",
        [
            *(V, "@moe", "rollout.return_routes=true"),
            "rollout.vllm.speculative_config={method: ngram, num_speculative_tokens: 2}",
        ],
        ["speculative_config with rollout.return_routes=true", "drafted and not taken"],
    ),
    (
        "vllm_can_do_it",
        [V, "@moe", "rollout.return_routes=true", "rollout.vllm.async_scheduling=false"],
        ["rollout.return_routes=true with rollout.vllm.async_scheduling (not tried)", "second model runner"],
    ),
    (
        "vllm_can_do_it",
        [
            *(V, "@moe", "cluster.device=cuda", "cluster.ranks=2", "rollout.layout.pp=2"),
            "rollout.return_routes=true",
        ],
        ["rollout.return_routes=true with rollout.layout.pp > 1 (not tried)", "remove one of the two"],
    ),
    (
        "vllm_can_do_it",
        [V, "rollout.temperature=0.7", "rollout.vllm.speculative_config={method: ngram}"],
        ["speculative_config with rollout.temperature=0.7"],
    ),
    (
        "vllm_can_do_it",
        [V, "rollout.vllm.speculative_config={method: mtp, num_speculative_tokens: 1}"],
        ["speculative_config with method=mtp", "no sync brings them", "ngram"],
    ),
    (
        "vllm_can_do_it",
        [V, "rollout.vllm.speculative_config={model: small}"],
        ["speculative_config with method=null"],
    ),
    (
        "vllm_can_do_it",
        [V, "cluster.device=cuda", "rollout.quantization=fp8", "rollout.vllm.load_format=auto"],
        ["rollout.vllm.load_format: rollout.quantization=fp8 loads nothing"],
    ),
    (
        "vllm_can_do_it",
        [
            V,
            "cluster.device=cuda",
            "rollout.quantization=fp8",
            "rollout.vllm.hf_overrides={quantization_config: {quant_method: awq}}",
        ],
        [
            'override "rollout.vllm.hf_overrides={',
            "rollout.vllm.hf_overrides.quantization_config: it is rollout.quantization; remove it",
        ],
    ),
    (
        "vllm_can_do_it",
        [V, "cluster.device=cuda", "rollout.quantization=fp8", "model.dtype=fp32"],
        ["vLLM multiplies 8 bits with bf16", "model.dtype=bf16"],
    ),
    (
        "expert_axes_need_experts",
        [V, "rollout.layout={tp: 2, ep: 2}", "cluster.ranks=2"],
        ["rollout.layout.ep=2: the model has no experts"],
    ),
    (
        "vllm_can_do_it",
        [V, "rollout.layout={pp: 4}", "cluster.ranks=4", "layout.pp=2", "rollout.vllm.async_scheduling=true"],
        ["rollout.vllm.async_scheduling with rollout.layout.pp=4", "takes wrong tokens"],
    ),
    ("vllm_can_do_it", [V, "rollout.layout={tp: 4, ep: 2}"], ["rollout.layout.ep=2", "ep=1 or ep=4"]),
    (
        "vllm_can_do_it",
        [V, "rollout.layout={tp: 2, ep: 2}", "cluster.device=cpu", "cluster.ranks=2"],
        ["ep=2: vLLM for CPU"],
    ),
    (
        "vllm_can_do_it",
        [V, "rollout.layout={pp: 2}", "cluster.device=cpu", "cluster.ranks=2"],
        ["rollout.layout.pp=2, ep=1: vLLM for CPU", "second stage"],
    ),
    ("vllm_can_do_it", [V, "rollout.vllm.max_model_len=9"], ["rollout.vllm.max_model_len: it is data."]),
]
