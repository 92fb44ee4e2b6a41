"""Recipes that break a rule of layouts, experts, the engine, optimizers or features: data for test_rules.py."""

OWN = "rollout.layout.tp=1"
"""A layout of the rollout's own, which the axes beyond tp, sp and pp need."""

# rule → overrides of a valid recipe that break it ("@moe" names a model) → parts of the message
BROKEN_ENGINE: list[tuple[str, list[str], list[str]]] = [
    ("only_available_features", ["rollout.layout.ep=2"], ["expert parallelism in the native rollout"]),
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
        [
            "engine.distributed_optimizer=false",
            "engine.overlap_grad_reduce=true",
            "engine.overlap_param_gather=true",
        ],
        [
            "engine.distributed_optimizer (optimizer state whole on each data-parallel rank) does not go with engine.overlap_param_gather",
            "set engine.distributed_optimizer=true",
        ],
    ),
    (
        "features_go_together",
        ["engine.overlap_grad_reduce=true", "engine.overlap_param_gather=true", "optimizer.name=sgd"],
        ["optimizer.name (SGD) does not go with engine.overlap_param_gather"],
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
        "features_go_together",
        ["model.build.family=mimo", "mtp.init_layers=1", "lora.rank=4"],
        ["lora (low-rank adapters) does not go with mtp.train", "set mtp.train=false"],
    ),
    (
        "tied_copies_are_updated_alike",
        [
            *("cluster.device=cuda", "layout.pp=2", "model.dtype=bf16", "optimizer.cpu_fraction=0.5"),
            *("model.build.family=mimo", "model.build.tied_embeddings=false", "mtp.init_layers=1"),
        ],
        ["has layers for multi-token prediction (mtp): its embedding is on two stages", "use 0 or 1"],
    ),
    (
        "tied_copies_are_updated_alike",
        ["cluster.device=cuda", "layout.pp=2", "model.dtype=bf16", "optimizer.cpu_fraction=0.5"],
        ["optimizer.cpu_fraction=0.5 with layout.pp=2", "rounding would part them", "use 0 or 1"],
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
        ["engine.megatron.freeze_moe_router=true"],
        ["decided by optimizer.frozen"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.fp4=e2m1"],
        ["engine.megatron.fp4: not available in this version", "ignore the field without a word"],
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
        ["decided by engine.aux_loss", "counts padding", "how a batch is cut"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_z_loss_coeff=0.001"],
        ["decided by engine.z_loss"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_router_load_balancing_type=seq_aux_loss"],
        ["decided by engine.aux_loss"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_router_bias_update_rate=0.001"],
        ["decided by engine.expert_bias_rate"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.moe_expert_capacity_factor=1.5"],
        ["which tokens are dropped would depend"],
    ),
    ("megatron_options_are_free", ["engine.megatron.mtp_num_layers=1"], ["decided by mtp"]),
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
        ["decided by layout.dynamic_cp"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.max_seqlen_per_dp_cp_rank=4096"],
        ["engine.tokens_per_microbatch_per_rank"],
    ),
    (
        "travelling_needs_ranks",
        ["@moe", "engine.overlap_dispatch=true"],
        ["engine.overlap_dispatch=true", "each rank has all experts", "set layout.ep above 1"],
    ),
    (
        "travelling_needs_ranks",
        ["engine.overlap_dispatch=true", "layout.ep=2", "cluster.ranks=2"],
        ["or the model has none"],
    ),
    (
        "gathering_needs_buckets",
        ["engine.overlap_param_gather=true"],
        ["engine.overlap_param_gather=true needs the buckets of engine.overlap_grad_reduce=true", "set both"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.cpu_offloading=true"],
        ["activations are not offloaded", "engine.offload_params"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.num_layers_in_first_pipeline_stage=1"],
        ["decided by layout.stage_layers"],
    ),
    ("megatron_options_are_free", ["engine.megatron.apply_rope_fusion=true"], ["quintet's own layers"]),
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
        ["engine.megatron.tp_comm_overlap=true"],
        ["communication of tp does not overlap", "engine.overlap_dispatch"],
    ),
    (
        "megatron_options_are_free",
        ["@moe", "engine.megatron.moe_enable_deepep=true"],
        ["quintet's own dispatcher, once to a rank", "DeepEP"],
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
        "megatron_options_are_free",
        ["@moe", "engine.megatron.moe_router_fusion=true", "engine.replay_routes=old"],
        ["moe_router_fusion does not go with engine.replay_routes=old", "remove one of the two"],
    ),
    (
        "megatron_options_are_free",
        ["@moe", "engine.megatron.moe_router_fusion=true", "rollout.return_routes=true"],
        ["moe_router_fusion does not go with rollout.return_routes=true of a native rollout", "tells none"],
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
        "recompute_modules_are_there",
        ["engine.recompute=selective", "engine.recompute_modules=[mlp, mlp_act]"],
        ["mlp_act is part of mlp"],
    ),
    (
        "recompute_modules_are_there",
        ["@moe", "engine.recompute=selective", "engine.recompute_modules=[mlp_act]"],
        ["mlp_act is of layers without experts"],
    ),
    (
        "keys_are_read",
        ["engine.cp_comm=all_to_all"],
        ["engine.cp_comm=all_to_all is not read while layout.cp=1"],
    ),
    (
        "keys_are_read",
        ["optimizer.momentum=0.5"],
        ["optimizer.momentum=0.5 is not read by optimizer.name=adamw, but by sgd"],
    ),
    (
        "keys_are_read",
        ["optimizer.name=sgd", "optimizer.beta1=0.8", "optimizer.eps=1e-6"],
        [
            "optimizer.beta1=0.8 is not read by optimizer.name=sgd, but by adamw and adam",
            "optimizer.eps=1e-06",
        ],
    ),
    (
        "keys_are_read",
        ["sft.optimizer.momentum=0.5"],
        ["sft.optimizer.momentum=0.5 is not read by sft.optimizer.name=adamw, but by sgd"],
    ),
    (
        "patterns_match",
        ["optimizer.lr_multipliers={'*.gate.weight': 0.1}"],
        [
            "optimizer.lr_multipliers: no weight is left for '*.gate.weight'",
            "the first one that matches counts",
        ],
    ),
    (
        "patterns_match",
        ["optimizer.lr_multipliers={'*': 0.5, '*.mlp.*': 0.1}"],
        ["no weight is left for '*.mlp.*'"],
    ),
    (
        "patterns_match",
        ["sft.optimizer.lr_multipliers={'*.q_proj.weight': 0.1}"],
        ["sft.optimizer.lr_multipliers: model.layers.0.self_attn.q_proj.weight has factor 0.1", "one tensor"],
    ),
    (
        "patterns_match",
        ["@moe", "optimizer.lr_multipliers={'*.experts.0.*': 0.1}"],
        ["experts.0.gate_proj.weight has factor 0.1", "one tensor"],
    ),
    (
        # Stored and not trained: it has no learning rate.
        "patterns_match",
        ["@mla", "optimizer.lr_multipliers={'*.e_score_correction_bias': 0.1}"],
        ["no weight is left"],
    ),
    (
        "patterns_match",
        ["@moe", "optimizer.frozen=['*.mlp.router.weight']"],
        ["optimizer.frozen: no weight in training matches '*.mlp.router.weight'", ".mlp.gate.weight"],
    ),
    (
        "patterns_match",
        ["optimizer.frozen=['*.q_proj.weight']"],
        [
            "self_attn.q_proj.weight is frozen and model.layers.0.self_attn.k_proj.weight and",
            "v_proj.weight are not, but the optimizer holds them as one tensor; let the patterns match all of it",
        ],
    ),
    ("patterns_match", ["optimizer.frozen=['*']"], ["optimizer.frozen: [*] leaves no weight to be trained"]),
    (
        "patterns_match",
        ["@moe", "optimizer.frozen=['*.gate.weight']", "optimizer.lr_multipliers={'*.gate.weight': 0.1}"],
        ["optimizer.lr_multipliers: no weight is left for '*.gate.weight'"],
    ),
    (
        "every_stage_trains",
        ["cluster.ranks=4", "layout.pp=4", OWN, "optimizer.frozen=['model.layers.1.*']"],
        ["optimizer.frozen leaves pipeline stage 1 (of 0 to 3) no weight to be trained", "layout.pp=4"],
    ),
    (
        "every_stage_trains",
        ["cluster.ranks=4", "layout.pp=4", OWN, "optimizer.frozen=['model.layers.0.*', 'model.embed*']"],
        ["optimizer.frozen leaves pipeline stage 0"],
    ),
    (
        "every_stage_trains",
        [
            "cluster.ranks=3",
            "layout.pp=3",
            "layout.stage_layers=[1, 2, 1]",
            OWN,
            "optimizer.frozen=['model.layers.[12].*']",
        ],
        ["optimizer.frozen leaves pipeline stage 1"],
    ),
    (
        "warm_up_freezes_the_same",
        ["sft.steps=2", "optimizer.frozen=['*.o_proj.weight']"],
        ["sft.optimizer.frozen=[] with optimizer.frozen=[*.o_proj.weight]", "give both the same"],
    ),
    (
        "features_go_together",
        ["optimizer.frozen=['*.o_proj.weight']", "lora.rank=4"],
        ["optimizer.frozen (frozen weights) does not go with lora", "lora=null"],
    ),
    (
        "expert_axes_need_experts",
        ["layout.ep=2", "cluster.ranks=2"],
        ["layout.ep=2: the model has no experts", "set layout.ep=1"],
    ),
    (
        "products_of_experts_can_be_had",
        ["engine.experts=torch"],
        ["engine.experts=torch is of experts, and the model has none"],
    ),
    (
        "products_of_experts_can_be_had",
        ["@moe", "engine.experts=torch", "engine.backend=portable"],
        ["portable ones have torch's products alone", "engine.backend=transformer_engine on GPUs"],
    ),
    (
        "products_of_experts_can_be_had",
        ["@moe", "engine.experts=torch", "engine.fp8=blockwise"],
        ["engine.experts=torch with engine.fp8=blockwise", "remove one of the two"],
    ),
    (
        "products_of_experts_can_be_had",
        ["@moe", "engine.experts=torch", "model.dtype=fp32"],
        ["engine.experts=torch with model.dtype=fp32", "bf16 alone"],
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
    (
        "ranks_divide",
        ["cluster.ranks=3", "layout.tp=2"],
        ["cluster.ranks=3 is not divisible", "2 × 1 × 1 = 2", "2 or 4"],
    ),
    ("ranks_divide", ["cluster.ranks=2", "rollout.layout.tp=4"], ["rollout.layout.tp × pp", "use 4 ranks"]),
    ("nodes_divide", ["cluster.ranks=3", "cluster.ranks_per_node=2"], ["cluster.ranks_per_node=2"]),
    (
        "features_go_together",
        ["lora.rank=4", "optimizer.cpu_fraction=0.5", "model.dtype=bf16", "cluster.device=cuda"],
        ["lora (low-rank adapters) does not go with optimizer.cpu_fraction", "cpu_fraction=0"],
    ),
    (
        "adapters_fit",
        ["lora.targets=[q_proj, qproj]"],
        ["lora.targets: 'qproj': no module has that name", "q_proj, k_proj, v_proj, o_proj", "all-linear"],
    ),
    (
        "adapters_fit",
        ["@moe", "lora.targets=[gate]"],
        ["it fits model.layers.0.mlp.gate, which is no linear layer with adapters"],
    ),
    (
        "adapters_fit",
        ["lora.targets=[model.embed_tokens]"],
        ["it fits model.embed_tokens, which is no linear layer with adapters"],
    ),
    (
        "adapters_fit",
        ["@moe", "lora.targets=[experts.0.down_proj]"],
        ["some experts' down_proj would have adapters and some not"],
    ),
    (
        "adapters_fit",
        ["lora.path=/nowhere"],
        ["lora.path: /nowhere/adapter_config.json does not exist", "save_pretrained"],
    ),
    (
        "every_stage_has_adapters",
        ["lora.targets=[layers.0.*.q_proj]", "layout.pp=2", "cluster.ranks=2"],
        ["no layer of 2 to 3 has adapters", "nothing to train"],
    ),
    (
        "blocks_halve",
        ["layout.dynamic_cp=true"],
        [
            "layout.dynamic_cp=true needs layout.cp > 1",
            "use layout.cp=2, with a multiple of 2 as cluster.ranks, or layout.dynamic_cp=false",
        ],
    ),
    (
        "blocks_halve",
        ["layout.dynamic_cp=true", "layout.tp=2", "cluster.ranks=24", OWN],
        ["needs layout.cp > 1", "; use layout.cp=2 or 4, which 24 ranks allow, or layout.dynamic_cp=false"],
    ),
    (
        "blocks_halve",
        ["layout.dynamic_cp=true", "layout.cp=6", "cluster.ranks=6", OWN],
        ["layout.cp=6 is no power of two; use layout.cp=2, which 6 ranks allow, or"],
    ),
    (
        "roles_layouts_are_layouts",
        ["algorithm.name=ppo", "critic.layout.cp=3", "critic.layout.dynamic_cp=true", "cluster.ranks=3"],
        [
            "critic.layout.cp=3 is no power of two; use critic.layout.cp=2, with a multiple of 2 as cluster.ranks",
            ", or critic.layout.dynamic_cp=false",
        ],
    ),
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
        "stages_hold_the_layers",
        ["layout.pp=3", "cluster.ranks=3"],
        ["layout.pp=3 does not divide the model's 4 layers", "balanced is layout.stage_layers=[1, 2, 1]"],
    ),
    (
        "stages_hold_the_layers",
        ["layout.pp=2", "layout.stage_layers=[3, 2]", "cluster.ranks=2"],
        ["layout.stage_layers=[3, 2] is 2 pipeline stages of 5 layers together", "makes 2 of 4"],
    ),
    (
        "stages_hold_the_layers",
        ["layout.pp=2", "layout.stage_layers=[1, 1, 2]", "cluster.ranks=2"],
        ["is 3 pipeline stages of 4 layers together, and layout.pp=2 with the model's 4 layers makes 2 of 4"],
    ),
    (
        "stages_hold_the_layers",
        [*("layout.pp=2", "layout.vpp=2", "layout.stage_layers=[3, 1]", "cluster.ranks=2"), OWN],
        ["is 2 chunks of pipeline stages of 4 layers together", "makes 4 of 4"],
    ),
    (
        "stages_hold_the_layers",
        ["layout.pp=3", "layout.stage_layers=[2, 0, 2]", "cluster.ranks=3"],
        ["leaves a stage in the middle without layers", "balanced is layout.stage_layers="],
    ),
    (
        "stages_hold_the_layers",
        ["layout.pp=3", "layout.stage_layers=[1, 2, 1]", "rollout.layout={pp: 3, tp: 2}", "cluster.ranks=6"],
        ["rollout.layout.pp=3 does not divide the model's 4 layers"],
    ),
    (
        "every_stage_has_adapters",
        ["lora.rank=2", "layout.pp=2", "layout.stage_layers=[0, 4]", "cluster.ranks=2"],
        ["no layer of an empty stage has adapters"],
    ),
    (
        "roles_layouts_are_layouts",
        [
            *("algorithm.name=ppo", "cluster.ranks=2", "critic.layout.pp=2"),
            "optimizer.frozen=['model.embed*', 'model.layers.[01].*']",
        ],
        ["optimizer.frozen leaves pipeline stage 0", "fewer stages than critic.layout.pp=2"],
    ),
    (
        "roles_layouts_are_layouts",
        [
            *("algorithm.name=ppo", "cluster.ranks=2", "layout.pp=2"),
            "critic.optimizer.frozen=['model.embed*', 'model.layers.[01].*']",
        ],
        ["critic.optimizer.frozen leaves pipeline stage 0", "fewer stages than critic.layout.pp=2"],
    ),
    (
        "roles_layouts_are_layouts",
        ["algorithm.name=ppo", "cluster.ranks=2", "critic.layout={pp: 2, stage_layers: [1, 1]}"],
        ["critic.layout.stage_layers=[1, 1] is 2 pipeline stages of 2 layers together"],
    ),
    ("model_divides", ["rollout.layout.tp=4", "cluster.ranks=4"], ["rollout.layout.tp=4 does not divide"]),
    (
        "stages_hold_the_layers",
        ["layout.pp=2", "layout.vpp=4", "cluster.ranks=2"],
        ["layout.pp × vpp = 2 × 4 does not divide the model's 4 layers", "4 divides by 1, 2, 4"],
    ),
    (
        "load_can_be_balanced",
        ["@dense", "engine.expert_bias_rate=0.001"],
        ["the model has no experts whose load"],
    ),
    ("load_can_be_balanced", ["@dense", "engine.aux_loss={}"], ["engine.aux_loss: the model has no experts"]),
    ("load_can_be_balanced", ["@dense", "engine.z_loss=0.001"], ["engine.z_loss: the model has no experts"]),
    (
        "load_can_be_balanced",
        ["@moe", "engine.expert_bias_rate=0.001"],
        ["engine.expert_bias_rate: a qwen3_moe model's routers have no bias", "or set engine.aux_loss"],
    ),
    (
        "features_go_together",
        ["@moe", "engine.expert_bias_rate=0.001", "lora.rank=4"],
        ["does not go with engine.expert_bias_rate (updates of the expert bias)", "or lora=null"],
    ),
]


def named(overrides: list[str], models: dict[str, list[str]]) -> list[str]:
    """Overrides with "@moe" replaced by those that name that model."""
    return [one for given in overrides for one in (models[given[1:]] if given[0] == "@" else [given])]
