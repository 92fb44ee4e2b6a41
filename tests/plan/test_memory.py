"""The formula of a rank's memory against what the engine allocates, and what autograd keeps."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from quintet.engine.layers import linear
from quintet.engine.product import by_onednn, packed
from quintet.models import family_of
from quintet.models.lora import LoraShape
from quintet.plan.activations import SINK_DIMS, kept_in_layer, of_chunk
from quintet.plan.memory import CHUNK_LOGITS_BYTES, KEPT_LOGITS_BYTES, Memory, packed_bytes, rank_memory
from quintet.plan.setup import Place, Setup
from quintet.recipe import schema
from tests.engine.checkpoint.ranks import parts_of
from tests.engine.storage import held
from tests.gpus import a_gpu_each

TOKENS = 512
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_SIZES: dict[str, Any] = {
    "vocab_size": 1021,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": _SIZES | {"architectures": ["Qwen2ForCausalLM"]},
    "llama": _SIZES | {"architectures": ["LlamaForCausalLM"], "head_dim": 48},
    "qwen3": _SIZES | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 48},
    "qwen3-tied": _SIZES
    | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 20, "tie_word_embeddings": True},
    "qwen3_moe": _SIZES
    | _EXPERTS
    | {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 48, "num_experts": 8},
    "deepseek_v3": _SIZES
    | _EXPERTS
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 8,
        "q_lora_rank": 80,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 40,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    "mixtral": _SIZES
    | _EXPERTS
    | {"architectures": ["MixtralForCausalLM"], "head_dim": 48, "num_local_experts": 8},
    "glm4_moe": _SIZES
    | _EXPERTS
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 48,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "mimo": _SIZES | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    "gpt_oss": _SIZES
    | _EXPERTS
    | {
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": 96,
        "head_dim": 48,
        "num_local_experts": 8,
        "sliding_window": 32,
    },
}
CONFIGS["deepseek_v3-ahead"] = CONFIGS["deepseek_v3"] | {"num_nextn_predict_layers": 1}


def setup(family: str, ranks: int = 1, **how: Any) -> Setup:
    """A case: keys of the layout, the engine and the optimizer, dtype, and head, each where it belongs."""

    def pick(section: Any) -> dict[str, Any]:
        return {key: how[key] for key in section.model_fields if key in how}

    shape = family_of(CONFIGS[family]).shape_of(CONFIGS[family])
    engine = schema.Engine(tokens_per_microbatch_per_rank=TOKENS, backend="portable", **pick(schema.Engine))
    trained = schema.Optimizer(**pick(schema.Optimizer)) if how.get("trained", True) else None
    return Setup(
        shape.as_value_model() if how.get("value") else shape,
        schema.Layout(**pick(schema.Layout)),
        ranks,
        engine=engine,
        optimizer=trained,
        dtype=how.get("dtype", "fp32"),
        device=how.get("device", DEVICE),
        lora=how.get("lora"),
        mtp=how.get("mtp"),
    )


def build(case: Setup) -> Any:
    from quintet.engine.engine import Engine

    how = {
        "engine": case.engine,
        "optimizer": case.optimizer,
        "dtype": case.dtype,
        "lora": case.lora,
        "mtp": case.mtp,
    }
    engine = Engine(case.shape, case.layout, **how)
    engine.start_optimizer(case.optimizer, 1)
    return engine


LORA = LoraShape(rank=5, alpha=10.0)
QUERIES = LoraShape(rank=3, alpha=6.0, targets=("q_proj", "q_b_proj", "experts.*.down_proj"))
STATIC: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3", 1, {"distributed_optimizer": False}),
    ("qwen2", 1, {"distributed_optimizer": False, "dtype": "bf16"}),
    ("qwen2", 1, {"distributed_optimizer": False, "dtype": "bf16", "name": "sgd"}),
    ("qwen2", 1, {"distributed_optimizer": False, "name": "sgd", "momentum": 0.0}),
    ("qwen3", 1, {"trained": False, "dtype": "bf16"}),
    ("qwen3-tied", 1, {"dtype": "bf16"}),
    ("qwen3-tied", 2, {"dtype": "bf16"}),
    ("qwen3", 2, {"tp": 2, "sp": True, "dtype": "bf16"}),
    ("qwen3", 2, {"cp": 2}),
    ("qwen3-tied", 2, {"pp": 2}),
    ("qwen3-tied", 4, {"pp": 2, "dtype": "bf16"}),
    ("qwen3-tied", 2, {"pp": 2, "vpp": 2, "dtype": "bf16"}),
    ("qwen3-tied", 2, {"pp": 2, "value": True}),
    ("qwen3-tied", 2, {"pp": 2, "stage_layers": [0, 4], "dtype": "bf16"}),
    ("deepseek_v3", 4, {"pp": 2, "vpp": 2, "stage_layers": [2, 1, 1, 0], "ep": 2, "dtype": "bf16"}),
    ("qwen3", 4, {"pp": 4, "stage_layers": [0, 3, 1, 0]}),
    ("mimo", 2, {"pp": 2, "stage_layers": [4, 0], "dtype": "bf16", "mtp": schema.Mtp()}),
    ("qwen3_moe", 1, {"dtype": "bf16"}),
    ("qwen3_moe", 4, {"ep": 2, "dtype": "bf16"}),
    ("qwen3_moe", 4, {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
    ("qwen3_moe", 2, {"tp": 2, "sp": True, "etp": 1, "distributed_optimizer": False}),
    ("deepseek_v3", 1, {"distributed_optimizer": False}),
    ("gpt_oss", 1, {"dtype": "bf16"}),
    ("gpt_oss", 4, {"tp": 2, "sp": True, "ep": 2, "dtype": "bf16"}),
    ("deepseek_v3", 2, {"tp": 2, "sp": True, "dtype": "bf16"}),
    ("deepseek_v3", 2, {"ep": 2, "value": True}),
    ("qwen2", 1, {"lora": LORA, "distributed_optimizer": False, "dtype": "bf16"}),
    ("qwen3-tied", 2, {"lora": LORA, "pp": 2, "vpp": 2, "dtype": "bf16"}),
    ("qwen3_moe", 4, {"lora": LORA, "tp": 2, "sp": True, "ep": 2, "etp": 1}),
    ("deepseek_v3", 2, {"lora": LORA, "tp": 2, "sp": True, "dtype": "bf16"}),
    ("deepseek_v3", 2, {"lora": QUERIES, "ep": 2, "value": True}),
    ("glm4_moe", 2, {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
    ("mixtral", 2, {"ep": 2, "dtype": "bf16"}),
    ("qwen3_moe", 1, {"frozen": ["*.mlp.gate.weight"], "distributed_optimizer": False}),
    ("qwen3_moe", 2, {"ep": 2, "dtype": "bf16", "frozen": ["*.mlp.experts.*", "*.mlp.gate.weight"]}),
    ("qwen3-tied", 2, {"pp": 2, "dtype": "bf16", "frozen": ["model.embed_tokens.weight"]}),
    ("mimo", 2, {"pp": 2, "trained": False, "dtype": "bf16"}),
    ("deepseek_v3-ahead", 2, {"ep": 2, "trained": False}),
    ("mimo", 2, {"pp": 2, "dtype": "bf16", "mtp": schema.Mtp()}),
    ("mimo", 4, {"pp": 2, "vpp": 2, "dtype": "bf16", "mtp": schema.Mtp()}),
    ("mimo", 2, {"pp": 2, "mtp": schema.Mtp(train=False)}),
    ("deepseek_v3-ahead", 2, {"tp": 2, "sp": True, "mtp": schema.Mtp()}),
]


def allocated(cases: list[Setup]) -> list[tuple[Place, dict[str, int], tuple[int, int]]]:
    """On one rank: its place, and bytes by kind after a step, and of a checkpoint what it reads and what it saves, in each case."""
    found = []
    for case in cases:
        engine = build(case)
        if case.optimizer is not None:
            engine.optimizer_step()
        at = engine.mesh.coordinates
        place = Place(**{axis: at[axis] for axis in ("pp", "dp", "cp", "edp")})
        parts = parts_of(engine)
        both = [sum(p.flat.nbytes for p in parts if p.saved or not saved) for saved in (False, True)]
        found.append((place, held(engine), tuple(both)))
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_static_parts_are_exact(pool, ranks):
    a_gpu_each(ranks)
    cases = [setup(family, n, **how) for family, n, how in STATIC if n == ranks]
    results = pool.run(allocated, ranks, cases)
    for number, case in enumerate(cases):
        of_all = [(rank_memory(case, rank[number][0]), rank[number]) for rank in results]
        for formula, (place, kinds, _) in of_all:
            found = (formula.parameters, formula.gradients, formula.optimizer)
            assert found == tuple(kinds.values()), (case.shape.family, case.layout, case.dtype, place)
        if case.optimizer is not None:
            check_host([(formula, both) for formula, (*_, both) in of_all], case)


def check_host(ranks: list[tuple[Memory, tuple[int, int]]], case: Setup) -> None:
    """Each rank reads what the formula says, but for the routers' biases and, of norms that tp repeats, one rank's; and all together
    save little less: what tp repeats, of adapters much, and a tied embedding are counted twice."""
    for formula, (read, _) in ranks:
        assert read == pytest.approx(formula.read, rel=1e-3), (case.shape.family, case.layout)
    said, saved = (sum(both) for both in zip(*((one.saved, both[1]) for one, both in ranks), strict=True))
    assert saved * (1 - 1e-5) <= said <= saved * (1.1 if case.lora is None else 1.7), case.layout


OVERLAP: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3", 2, {"dtype": "bf16"}),
    ("qwen3", 2, {"cp": 2}),
    ("qwen3", 2, {"distributed_optimizer": False}),
    ("qwen3-tied", 2, {"pp": 2}),
    ("qwen3_moe", 2, {"ep": 2, "dtype": "bf16"}),
    ("qwen3", 4, {"pp": 2, "vpp": 2, "dtype": "bf16"}),
    ("qwen3_moe", 4, {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
]


def allocated_in_buckets(
    elements: int, cases: list[Setup]
) -> list[tuple[Place, dict[str, int], tuple[int, int]]]:
    with mock.patch("quintet.plan.parameters.bucket_elements", return_value=elements):
        return allocated(cases)


@pytest.mark.parametrize("ranks", [2, 4])
def test_buckets_of_gradients_are_padded_each(pool, ranks):
    a_gpu_each(ranks)
    elements = 300_001
    cases = [setup(family, n, overlap_grad_reduce=True, **how) for family, n, how in OVERLAP if n == ranks]
    results = pool.run(allocated_in_buckets, ranks, elements, cases)
    cut = 0
    for number, case in enumerate(cases):
        for place, kinds, _ in (rank[number] for rank in results):
            with mock.patch("quintet.plan.parameters.bucket_elements", return_value=elements):
                formula = rank_memory(case, place)
            found = (formula.parameters, formula.gradients, formula.optimizer)
            assert found == tuple(kinds.values()), (case.shape.family, case.layout, case.dtype, place)
            cut += found != tuple(
                getattr(rank_memory(case, place), k) for k in ("parameters", "gradients", "optimizer")
            )
    assert cut, "one bucket would have come to the same"


def packed_copies(cases: list[Setup]) -> list[tuple[Place, int]]:
    """On one rank: its place, and bytes of what a native rollout packs in each case."""
    found = []
    for case in cases:
        model = build(replace(case, optimizer=None)).model
        with linear.packed_weights(model.decoder):
            copies = [
                one.packed
                for one in model.modules()
                if isinstance(one, linear._Direct) and one.packed is not None
            ]
        if model.post_process:
            copies.append(packed(model.head_weight()))
        at = model.mesh.coordinates
        found.append((Place(pp=at["pp"]), sum(one.numel() * one.element_size() for one in copies)))
    return found


@pytest.mark.skipif(DEVICE != "cpu" or not by_onednn(torch.ones(1)), reason="of CPUs that multiply by oneDNN")
@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_copies_are_exact(pool, ranks):
    layouts = {1: [{}], 2: [{"tp": 2, "sp": True}, {"pp": 2}, {"pp": 2, "stage_layers": [1, 3]}]}[ranks]
    families = ("qwen2", "qwen3-tied", "deepseek_v3", "qwen3_moe", "glm4_moe", "mimo")
    cases = [setup(family, ranks, **how) for family in families for how in layouts]
    for rank in pool.run(packed_copies, ranks, cases):
        for case, (place, size) in zip(cases, rank, strict=True):
            assert packed_bytes(case, place.pp) == size, (case.shape.family, case.layout, place)
    assert (
        packed_bytes(replace(cases[0], dtype="bf16")) == packed_bytes(replace(cases[0], device="cuda")) == 0
    )


def test_micro_batches_keep_what_a_stage_has():
    """As many layers as it holds, for as many micro-batches as are in flight there."""

    def kept_at(stage, counts, vpp=1):
        case = setup("deepseek_v3", 2, pp=2, vpp=vpp, stage_layers=counts, dtype="bf16")
        return rank_memory(case, Place(pp=stage)).activations

    for vpp, counts in ((1, [2, 2]), (2, [1, 1, 1, 1])):
        assert [kept_at(p, counts, vpp) for p in (0, 1)] == [kept_at(p, None, vpp) for p in (0, 1)]
    case = setup("deepseek_v3", 2, pp=2, dtype="bf16")
    dense, experts = (of_chunk(case, range(n, n + 1), ends=False) for n in (0, 1))
    assert kept_at(0, [1, 3]) == 2 * dense
    assert kept_at(0, [3, 1]) == 2 * (dense + 2 * experts)
    assert kept_at(1, [1, 3]) - kept_at(1, [3, 1]) == 2 * experts
    assert kept_at(0, [0, 4]) == 0


def test_the_share_on_the_cpu_leaves_the_device():
    plain, half = (rank_memory(setup("qwen3", dtype="bf16", cpu_fraction=f)) for f in (0.0, 0.5))
    assert half.optimizer == plain.optimizer / 2
    # master, two moments and the gradient's copy, against master and moments
    assert half.host_optimizer == half.optimizer * 16 / 12


def kept(cases: list[Setup]) -> list[int]:
    """Bytes of storage that autograd keeps of one micro-batch's forward pass, parameters and tables apart."""
    from quintet.data.batch import make_batch
    from quintet.packing.plan import RankCell

    found = []
    for case in cases:
        engine = build(case)
        length = TOKENS // 4
        batch = make_batch([[1] * length] * 4, [3] * 4)
        cells = [RankCell([0, 1, 2, 3], engine.layout.cp, engine.mesh.at("cp"))]
        load = engine._load(batch, cells, 1.0, None)
        micro, row = next(engine._pipeline.rows(batch, cells, engine.depths, load=load))
        known = {p.untyped_storage()._cdata for c in engine.chunks for p in c.parameters()}
        seen: dict[int, Any] = {}

        def pack(tensor: Any, seen: dict[int, Any] = seen) -> Any:
            seen.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
            return tensor

        engine.model.train()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = engine._wrapped[0](micro.input_ids.to(engine.model.device), row, engine.depths > 0)
            if engine.depths:
                *_, hidden = engine.model.look_ahead(hidden, micro, row, detach=False)
        # What recomputation discards is in the list with a size of 0.
        found.append(sum(s.nbytes() for key, s in seen.items() if key not in known))
        hidden.sum().backward()
    return found


ACTIVATIONS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"dtype": "bf16"}),
    ("llama", {}),
    ("llama", {"dtype": "bf16"}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"dtype": "bf16"}),
    ("qwen3_moe", {"z_loss": 0.1}),
    ("qwen3_moe", {"aux_loss": schema.AuxLoss(), "z_loss": 0.1}),
    ("qwen3_moe", {"aux_loss": schema.AuxLoss(per="batch")}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"dtype": "bf16"}),
    ("deepseek_v3", {"aux_loss": schema.AuxLoss()}),
    ("glm4_moe", {}),
    ("mixtral", {}),
    ("qwen3", {"lora": LORA}),
    ("llama", {"lora": LORA, "recompute": "selective", "recompute_modules": ["mlp"]}),
    ("qwen3_moe", {"lora": LORA}),
    ("gpt_oss", {}),
    ("gpt_oss", {"dtype": "bf16"}),
    ("mimo", {"mtp": schema.Mtp()}),
    ("deepseek_v3-ahead", {"mtp": schema.Mtp(), "dtype": "bf16"}),
    ("deepseek_v3-ahead", {"mtp": schema.Mtp(), "recompute": "full"}),
    *((family, {"recompute": "full"}) for family in ("qwen3", "qwen3_moe", "deepseek_v3")),
    *(
        (family, {"recompute": "selective", "recompute_modules": modules.split()})
        for family, modules in (
            ("qwen3", "core_attn"),
            ("llama", "core_attn"),
            ("qwen3", "mlp"),
            ("qwen3", "layernorm"),
            ("qwen3", "mlp_act"),
            ("llama", "mlp_act layernorm"),
            ("qwen3", "core_attn mlp layernorm"),
            ("qwen3_moe", "layernorm"),
            ("qwen3_moe", "moe"),
            ("qwen3_moe", "moe_act"),
            ("gpt_oss", "core_attn moe_act"),
            ("deepseek_v3", "core_attn"),
            ("deepseek_v3", "mla_up_proj"),
            ("deepseek_v3", "core_attn mla_up_proj"),
            ("deepseek_v3", "shared_experts moe_act"),
        )
    ),
]
PARALLEL: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"tp": 2}),
    ("qwen3", {"tp": 2, "sp": True}),
    ("qwen3", {"tp": 2, "sp": True, "recompute": "full"}),
    ("llama", {"tp": 2, "sp": True, "dtype": "bf16"}),
    ("deepseek_v3", {"tp": 2, "sp": True}),
    ("qwen3_moe", {"ep": 2}),
    ("qwen3_moe", {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
    ("mimo", {"mtp": schema.Mtp(), "tp": 2, "sp": True}),
    ("qwen3", {"lora": LORA, "tp": 2, "sp": True}),
    ("deepseek_v3", {"lora": LORA, "tp": 2, "sp": True}),
    ("gpt_oss", {"ep": 2}),
]
TOLERANCE = (
    0.01 if DEVICE == "cpu" else 0.03
)  # rotary tables, token ids and small index tensors are not counted


@pytest.mark.parametrize(
    ("ranks", "table"),
    [pytest.param(*one, marks=pytest.mark.slow) for one in ((1, ACTIVATIONS), (2, PARALLEL))],
)
def test_activations_are_what_autograd_keeps(pool, ranks, table):
    a_gpu_each(ranks)
    if DEVICE == "cuda":  # flash attention is bf16
        table = [(family, how | {"dtype": "bf16"}) for family, how in table]
    cases = [setup(family, ranks, **how) for family, how in table]
    results = pool.run(kept, ranks, cases)
    for number, (case, row) in enumerate(zip(cases, table, strict=True)):
        # Routes decide which rank's experts get how many tokens, not how many all get.
        measured = sum(rank[number] for rank in results) / ranks
        formula = of_chunk(case, range(case.shape.layers), ends=True)
        assert formula == pytest.approx(measured, rel=TOLERANCE), (row, formula / measured)


def head_kept(case: Setup, tokens: int) -> tuple[int, int]:
    """Bytes the head keeps of `tokens` rows, and bytes of the weight's gradient."""
    from quintet.engine import head

    width = torch.float32 if case.dtype == "fp32" else torch.bfloat16
    hidden = torch.randn(tokens, case.shape.hidden_size, dtype=width, requires_grad=True)
    weight = torch.randn(case.shape.vocab_size, case.shape.hidden_size, dtype=width, requires_grad=True)
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    vocab = head.VocabSlice(len(weight), case.shape.vocab_size, dist.group.WORLD)
    scores = head.log_probs_and_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.int64), vocab)
    kept = scores.logprobs.grad_fn.kept_logits
    scores.logprobs.sum().backward()
    return kept.nbytes, weight.grad.nbytes


def test_sinks_are_as_wide_as_kernels_want():
    from quintet.engine.layers.attention_sinks import SPARE

    assert SINK_DIMS == SPARE


def test_the_head_keeps_its_logits(pool):
    from quintet.engine import head

    assert head.KEPT_BYTES == KEPT_LOGITS_BYTES
    assert head.CHUNK_BYTES == CHUNK_LOGITS_BYTES
    case = setup("qwen3", dtype="bf16", device="cpu")
    ((logits, weight),) = pool.run(head_kept, 1, case, 300)
    some, none = (rank_memory(replace(case, trained_tokens=n)).head for n in (300, 0))
    rows = 300 * (2 * case.shape.hidden_size * case.width + 24)
    assert some - none == logits + rows
    assert none == weight + TOKENS * case.shape.hidden_size * case.width


def test_a_head_with_more_logits_than_it_keeps():
    big = replace(setup("qwen3", dtype="bf16"), device="cuda", trained_tokens=1 << 22)
    vocabulary = big.shape.vocab_size * big.width
    rows = (1 << 22) * (2 * big.shape.hidden_size * big.width + 24)
    weight = big.shape.vocab_size * big.shape.hidden_size * (big.width + 4)
    stream = TOKENS * big.shape.hidden_size * big.width
    kept = rank_memory(big).head - rows - weight - stream
    assert KEPT_LOGITS_BYTES["cuda"] + CHUNK_LOGITS_BYTES["cuda"] - kept < vocabulary


def test_heads_that_are_distilled_leave_the_memory_for_logits_to_the_models_own():
    of = [
        replace(setup("mimo", mtp=schema.Mtp(loss=loss), device="cuda"), trained_tokens=1 << 22)
        for loss in ("cross_entropy", "self_distill")
    ]
    shared, alone = (rank_memory(one).head for one in of)
    row = of[0].shape.vocab_size * of[0].width
    teacher = (1 << 22) * of[0].shape.hidden_size * of[0].width
    assert abs(alone - teacher - shared) < 2 * row


def test_a_value_head_has_no_logits():
    case = setup("qwen3", dtype="bf16", value=True)
    memory, language = rank_memory(case), rank_memory(setup("qwen3", dtype="bf16"))
    assert memory.head < language.head - TOKENS * case.shape.vocab_size
    assert language.parameters - memory.parameters >= 2 * case.shape.hidden_size * (case.shape.vocab_size - 1)


def test_pipelines_hold_micro_batches_in_flight():
    one = rank_memory(setup("qwen3")).activations
    norm = of_chunk(setup("qwen3"), range(0), ends=True)
    stages = [rank_memory(setup("qwen3", 4, pp=4), Place(pp=p)).activations for p in range(4)]
    layer = (one - norm) // 4
    assert stages == [4 * layer, 3 * layer, 2 * layer, layer + norm]
    few = replace(setup("qwen3", 4, pp=4), microbatches=2)
    assert rank_memory(few).activations == 2 * layer
    # Interleaved on two stages, two chunks of a layer each: 2 (2 - 0 - 1) + (2 - 1) 2 + 1 passes.
    interleaved = setup("qwen3", 2, pp=2, vpp=2)
    assert rank_memory(interleaved).activations == 5 * layer
    assert rank_memory(interleaved, Place(pp=1)).activations == 3 * layer + norm


def test_the_peak_is_the_worst_moment():
    memory = Memory(parameters=2, gradients=4, optimizer=12, activations=7, head=5, workspace=3)
    assert memory.static == 18
    assert memory.peak == 30
    assert replace(memory, step_workspace=20).peak == 38
    assert replace(memory, workspace=6).peak == 31


@pytest.mark.slow
def test_the_benchmark_runs_dry():
    command = [sys.executable, "-m", "benchmarks.memory", "--tiny", "--recompute", "full"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=400)
    ratios = {line.split()[0]: float(line.split()[-1]) for line in done.stdout.splitlines()[2:5]}
    assert ratios == {"parameters": 1.0, "gradients": 1.0, "optimizer": 1.0}


def test_a_rank_with_one_group_of_heads_keeps_its_part():
    """TransformerEngine's norms copy q and k, whether a rank's heads are of one group or of several."""
    some, one = (
        kept_in_layer(
            replace(
                setup("qwen3", tp, device="cuda", dtype="bf16", tp=tp, sp=True), backend="transformer_engine"
            ),
            0,
        )
        for tp in (2, 4)
    )
    assert some == 2 * one
