"""Recipes that break a rule of engine.fp8: data for test_rules.py."""

OWN = "rollout.own_processes=true"
"""A rollout with weights of its own."""
WIDE = [
    *("model.build.hidden_size=256", "model.build.ffn_hidden_size=512", "model.build.heads=4"),
    *("model.build.kv_heads=2", "model.build.head_dim=64"),
]
"""A model of which only heads are no whole blocks."""
ON_GPU = ["cluster.device=cuda", "model.dtype=bf16"]
VLLM = ["rollout.backend=vllm", "rollout.quantization=fp8"]

# rule → overrides of a valid recipe that break it ("@moe" names a model) → parts of the message
BROKEN_FP8: list[tuple[str, list[str], list[str]]] = [
    *(
        (
            "features_go_together",
            [f"engine.fp8={fp8}", *others],
            ["engine.fp8 (products in 8 bits with", said],
        )
        for fp8 in ("tensorwise", "blockwise")
        for others, said in (
            (["model.dtype=fp32"], "does not go with model.dtype (fp32)"),
            (["lora.rank=4"], "does not go with lora (low-rank adapters)"),
            ([], "does not go with rollout.layout (a rollout on the engine's weights)"),
        )
    ),
    (
        "devices_suffice",
        ["engine.fp8=tensorwise", "cluster.device=cpu", OWN],
        ["needs GPUs", "engine.fp8=null"],
    ),
    (
        "eight_bits_are_installed",
        ["engine.fp8=tensorwise", *ON_GPU, OWN],
        ["engine.fp8=tensorwise: TransformerEngine is not installed here"],
    ),
    (
        "eight_bits_need_transformer_engine",
        ["engine.fp8=tensorwise", "engine.backend=portable", *ON_GPU, OWN],
        ["engine.fp8=tensorwise with engine.backend=portable", "no products in 8 bits"],
    ),
    (
        "eight_bits_fit_the_matrices",
        ["engine.fp8=tensorwise", "model.build.ffn_hidden_size=328", *ON_GPU, OWN],
        [
            "feed-forward (down) would be 128 × 328 on a rank of layout",
            "multiples of 16; set engine.fp8=null",
        ],
    ),
    (
        "eight_bits_fit_the_matrices",
        ["engine.fp8=blockwise", "cluster.ranks=4", "layout.tp=4", "model.build.kv_heads=4", *ON_GPU, OWN],
        [
            "attention's q, k and v would be 96 × 128",
            "multiples of 128; use a smaller layout.tp (of experts etp), or set engine.fp8=tensorwise",
        ],
    ),
    (
        "eight_bits_fit_the_matrices",
        [
            *("@moe", "engine.fp8=tensorwise", "algorithm.kl_coef=0.1", "cluster.ranks=2", *ON_GPU, OWN),
            *("reference.layout.tp=2", "reference.layout.sp=true"),
        ],
        ["experts (gate and up) would be 24 × 64 on a rank of reference.layout"],
    ),
    (
        "samples_fit_a_microbatch",
        [
            *("engine.fp8=blockwise", "algorithm.kl_coef=0.1", "cluster.ranks=4", *ON_GPU, OWN),
            *(
                "reference.layout.tp=4",
                "reference.layout.sp=true",
                "engine.tokens_per_microbatch_per_rank=1700",
            ),
            *("rollout.max_response_tokens=1025", "data.max_prompt_tokens=512"),
        ],
        [
            "= 1537 is 2048 with padding to a multiple of 512, more than",
            "=1700 × reference.layout.cp=1 (1536 in whole",
        ],
    ),
    (
        "eight_bits_are_the_same_on_both_sides",
        ["engine.fp8=tensorwise", *VLLM, *ON_GPU],
        ["the rollout has a scale for each 128 × 128 weights", "set engine.fp8=blockwise"],
    ),
    (
        "eight_bits_are_the_same_on_both_sides",
        ["engine.fp8=blockwise", *WIDE, *VLLM, *ON_GPU],
        [
            "attention's q, k and v have parts of 64 rows on a rank",
            "lie across two of them",
            "not; set engine.fp8=null, or rollout.quantization=null",
        ],
    ),
    (
        "eight_bits_are_the_same_on_both_sides",
        [
            *("engine.fp8=blockwise", *WIDE, "model.build.head_dim=128", "model.build.ffn_hidden_size=128"),
            *("cluster.ranks=2", "layout.tp=2", *VLLM, *ON_GPU),
        ],
        [
            "feed-forward (gate and up) have parts of 64 rows on a rank",
            "not; use a smaller layout.tp (of experts etp), or rollout.quantization=null",
        ],
    ),
    (
        "eight_bits_are_the_same_on_both_sides",
        ["@mla", "engine.fp8=blockwise", *VLLM, *ON_GPU],
        ["latent attention's down projections stay in bf16"],
    ),
    (
        "rollouts_hold_whole_blocks",
        ["model.build.head_dim=128", "model.build.ffn_hidden_size=448", *VLLM, *ON_GPU],
        ["feed-forward parts are 448 wide on a rank of vLLM", "128; use rollout.quantization=null"],
    ),
    (
        "rollouts_hold_whole_blocks",
        ["@mla", *VLLM, *ON_GPU],
        ["hidden states are 64 wide on a rank of vLLM", "128; use rollout.quantization=null"],
    ),
    (
        "inputs_in_8_bits_are_kept",
        [
            *("@mla", "engine.fp8=tensorwise", *ON_GPU, OWN, "engine.recompute=selective"),
            "engine.recompute_modules=[layernorm, mlp_act]",
        ],
        [f"{one} with engine.fp8=tensorwise is untried" for one in ("layernorm", "mlp_act")],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.fp8=hybrid"],
        ["engine.megatron.fp8: decided by engine.fp8"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_router_padding_for_fp8=true"],
        ["routed choices are padded by experts themselves"],
    ),
]
