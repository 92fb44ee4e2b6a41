"""FP8 in the engine, as far as a CPU shows it: what core is told, what is computed again, and which copies of weights are left."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version

from quintet.engine.weights import fp8 as blocks
from quintet.errors import SyncMismatch, UserError
from quintet.models import ModelShape, MoeShape
from tests.engine.test_config import _megatron as _megatron
from tests.engine.test_config import config
from tests.engine.test_fp8 import naive
from tests.engine.test_fp8_fingerprint import drawn
from tests.engine.test_shards import SHAPE
from tests.oracle.models import save


@pytest.mark.parametrize(("fp8", "form"), [("tensorwise", "hybrid"), ("blockwise", "e4m3")])
def test_core_is_told_the_recipe(fp8: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import transformer_config

    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda version: True)
    made = config(SHAPE, fp8=fp8)
    assert (made.fp8, made.fp8_recipe) == (form, fp8)
    assert not made.fp8_param
    assert made.moe_router_padding_for_quantization in (False, None)
    assert config(SHAPE).fp8 is None


def engine(path: Path, **settings: Any) -> Any:
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema

    optimizer = schema.Optimizer()
    made = Engine(
        read_shape(path).without_mtp(),
        schema.Layout(),
        engine=schema.Engine(**settings),
        optimizer=optimizer,
        dtype="fp32",
    )
    made.load_hf(path)
    return made


def asked(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        engine(path, fp8="blockwise")
    return str(caught.value)


def test_an_engine_that_cannot_says_so(pool, tmp_path: Path) -> None:
    """Core alone would train on without a word."""
    (said,) = pool.run(asked, 1, save("qwen3", tmp_path / "model"))
    assert "engine.fp8=blockwise: the layers are portable here" in said


def fake(version: str, can: bool = True, powers: bool = True) -> dict[str, Any]:
    """TransformerEngine as a rank asks it: whether it is new enough, what this GPU can do, and how it scales blocks."""
    state = SimpleNamespace(
        is_fp8_available=lambda: (can, "Device compute capability 8.9 or higher required."),
        is_fp8_block_scaling_available=lambda: (can, "FP8 block scaled GEMM requires Hopper."),
    )
    rule = SimpleNamespace(fp8_quant_fwd_weight=SimpleNamespace(power_2_scale=powers))
    return {
        "transformer_engine": SimpleNamespace(__version__=version),
        "transformer_engine.common": SimpleNamespace(),
        "transformer_engine.common.recipe": SimpleNamespace(Float8BlockScaling=lambda: rule),
        "transformer_engine.pytorch": SimpleNamespace(),
        "transformer_engine.pytorch.fp8": SimpleNamespace(FP8GlobalStateManager=state),
    }


@pytest.mark.parametrize(
    ("fp8", "installed", "said"),
    [
        ("tensorwise", fake("2.5.0"), "engine.fp8=tensorwise needs TransformerEngine 2.6 or later"),
        ("tensorwise", fake("2.8.0", can=False), "this GPU cannot: Device compute capability 8.9"),
        ("blockwise", fake("2.8.0", can=False), "this GPU cannot: FP8 block scaled GEMM requires Hopper"),
        ("blockwise", fake("2.8.0", powers=False), "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 has"),
        ("tensorwise", fake("2.8.0", powers=False), None),
        ("blockwise", fake("2.8.0"), None),
    ],
)
def test_a_rank_whose_gpu_or_package_cannot_says_why(
    fp8: str, installed: dict[str, Any], said: str | None
) -> None:
    from megatron.core import utils

    from quintet.engine.fp8 import require

    version = Version(installed["transformer_engine"].__version__)
    with (
        mock.patch.dict(sys.modules, installed),
        mock.patch.object(utils, "get_te_version", return_value=version),
        contextlib.nullcontext() if said is None else pytest.raises(UserError, match=said),
    ):
        require(fp8, "transformer_engine")


@pytest.mark.parametrize("fp8", ["blockwise", "tensorwise", None])
def test_a_sync_of_other_blocks_than_are_multiplied_by_is_refused(fp8: str | None) -> None:
    """Each time that fingerprints are told, before they are."""
    from quintet.controller import worker

    def tell(*of: Any) -> str:
        return "told"

    rank = SimpleNamespace(
        _exported=list,
        placement=SimpleNamespace(adapters_separate=False),
        recipe=SimpleNamespace(rollout=SimpleNamespace(quantization="fp8"), engine=SimpleNamespace(fp8=fp8)),
        engine=SimpleNamespace(chunks=[]),
        shape=SHAPE,
        _indexer=SimpleNamespace(tell=tell),
    )
    rank._same_blocks = lambda: worker.PolicyWorker._same_blocks(rank)  # type: ignore[arg-type]
    refused = pytest.raises(SyncMismatch, match=r"would multiply by other weights in 8 bits .*fc1.weight")
    with (
        mock.patch.object(worker, "other_blocks", return_value=["decoder.layers.0.mlp.linear_fc1.weight"]),
        mock.patch.object(worker, "quantized_fingerprints", return_value=({}, {})),
        refused if fp8 == "blockwise" else contextlib.nullcontext(),
    ):
        assert worker.PolicyWorker.fingerprints(rank) == "told"  # type: ignore[arg-type]


def recomputed(path: Path, modules: list[str], outside: bool = False) -> tuple[list[str], list[str]]:
    """Of a mini-batch whose layers are told of FP8 after they were made: who asks TransformerEngine to compute again, and whom else.
    outside: layers compute again by core's own function, planted."""
    import megatron.core.extensions.transformer_engine as te
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import transformer_block

    from quintet.data.batch import make_batch
    from quintet.engine import fp8
    from quintet.engine.layers import mlp
    from quintet.packing.plan import RankCell
    from tests.engine.test_engine import Nll
    from tests.oracle.reference import PROMPT, token_ids

    made = engine(path, recompute="selective", recompute_modules=modules)
    real, by_te, others = tensor_parallel.checkpoint, [], []
    group = made.mesh.groups.tp

    def te_checkpoint(function: Any, distributed: bool, tracker: Any, tp: Any, *tensors: Any) -> Any:
        assert (distributed, tracker, tp) == (False, random.get_cuda_rng_tracker, group)
        by_te.append(type(getattr(function, "func", function)).__name__)
        return real(function, False, *tensors)

    def core(function: Any, *args: Any) -> Any:
        others.append(repr(function))
        return real(function, *args)

    def without_output(fp8: Any = False) -> Any:
        (by_te if fp8 else others).append("CheckpointWithoutOutput")
        return random.CheckpointWithoutOutput(fp8=None)

    batch = make_batch(token_ids(), [PROMPT] * len(token_ids()))
    with contextlib.ExitStack() as patches:
        for target, name, instead in (
            (te, "te_checkpoint", te_checkpoint),
            (tensor_parallel, "checkpoint", core),
            (mlp, "CheckpointWithoutOutput", without_output),
            (transformer_block, "get_fp8_context", lambda *a: contextlib.nullcontext()),
            (made.config, "fp8", "e4m3"),
        ):
            patches.enter_context(mock.patch.object(target, name, instead))
        if outside:
            patches.enter_context(
                mock.patch.object(
                    fp8, "checkpoint", lambda function, config, group, *given: core(function, False, *given)
                )
            )
        made.forward_backward(batch, [RankCell(list(range(len(token_ids()))))], Nll(1e-3))
    return by_te, others


@pytest.mark.parametrize(
    ("family", "modules"),
    [("qwen3", ["mlp"]), ("qwen3_moe", ["moe"]), ("deepseek_v3", ["mlp", "shared_experts", "mla_up_proj"])],
)
def test_products_are_computed_again_in_the_context_of_the_first_time(
    pool, tmp_path: Path, family: str, modules: list[str]
) -> None:
    """Every product under a checkpoint goes through TransformerEngine's own, with the group of the layout: none through core's, whose
    backward is outside of FP8, and none asks for process-global groups."""
    by_te, others = pool.run(recomputed, 1, save(family, tmp_path / family), modules)[0]
    assert not others
    assert len(by_te) >= 4  # layers


def test_products_that_are_computed_again_outside_of_it_are_seen(pool, tmp_path: Path) -> None:
    by_te, others = pool.run(recomputed, 1, save("qwen3", tmp_path / "model"), ["mlp"], True)[0]
    assert not by_te
    assert others


def left(path: Path, kept: bool = False, fails: bool = False) -> tuple[int, int]:
    """How many copies of weights were made in a forward pass, and how many are left; as TransformerEngine's layers keep them. kept:
    nobody drops them, planted. fails: the pass ends in an error."""
    from quintet.data.batch import make_batch
    from quintet.engine import fp8
    from quintet.packing.plan import RankCell
    from tests.oracle.reference import PROMPT, token_ids

    made, seen = engine(path), 0
    (chunk,) = made.chunks
    for module in chunk.decoder.modules():
        if type(module).__name__ in ("ColumnLinear", "RowLinear"):
            module._fp8_workspaces = {}
            module.register_forward_hook(lambda m, *_: m._fp8_workspaces.update(weight=m.weight.clone()))

    def copies() -> int:
        return sum(len(getattr(module, "_fp8_workspaces", ())) for module in chunk.modules())

    def count(*_: Any) -> None:
        nonlocal seen
        seen = copies()
        if fails:
            raise ArithmeticError

    chunk.decoder.register_forward_hook(count)
    batch = make_batch(token_ids(), [PROMPT] * len(token_ids()))
    kept_or_not = mock.patch.object(fp8, "drop_copies") if kept else contextlib.nullcontext()
    with kept_or_not, contextlib.suppress(ArithmeticError):
        made.forward(batch, [RankCell(list(range(len(token_ids()))))])
    return seen, copies()


def test_no_copy_of_a_weight_outlives_its_run(pool, tmp_path: Path) -> None:
    """None can be stale after a step, a load or a sync, and none is left that offload does not know of."""
    made, after = pool.run(left, 1, save("qwen3", tmp_path / "model"))[0]
    assert made == 4 * 4
    assert after == 0
    assert pool.run(left, 1, tmp_path / "model", True)[0] == (made, made)
    assert pool.run(left, 1, tmp_path / "model", False, True)[0] == (made, 0)


@pytest.mark.usefixtures("_megatron")
def test_no_layer_is_told_that_a_micro_batch_is_the_first() -> None:
    """It would write over what another half of the row has added to its gradient buffer."""
    from megatron.core.transformer.module import MegatronModule

    from quintet.engine.megatron_compat import no_first_microbatch

    told = []
    for guarded in (False, True):
        chunk = MegatronModule(SimpleNamespace(fp8="hybrid", fp4=None))
        chunk.linear = torch.nn.Linear(1, 1)
        chunk.linear.is_first_microbatch = False
        if guarded:
            no_first_microbatch(chunk)
        chunk.set_is_first_microbatch()
        told.append(chunk.linear.is_first_microbatch)
    assert told == [True, False]


def rules(path: Path) -> list[list[str]]:
    """Weights that differ, where TransformerEngine's blocks are by the same rule, and by others."""
    from quintet.engine import fp8

    made = engine(path)
    for module in made.chunks[0].decoder.modules():
        if hasattr(module, "weight") and module.weight is not None and module.weight.dim() == 2:
            module._fp8_workspaces = {}

    def same(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scales = naive(weight)
        return quantized.view(torch.uint8), torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))

    def not_powers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = weight.abs().amax().view(1, 1) / blocks.LARGEST
        return (weight / scales).to(blocks.DTYPE).view(torch.uint8), scales

    def other_bytes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scales = same(weight)
        quantized[-1, -1] ^= 1
        return quantized, scales

    found = []
    for rule in (same, not_powers, other_bytes):
        with mock.patch.object(fp8, "transformer_engine_blocks", rule):
            found.append(fp8.other_blocks(made.chunks))
    return found


def test_other_scales_or_bytes_than_are_sent_are_named(pool, tmp_path: Path) -> None:
    same, not_powers, other_bytes = pool.run(rules, 1, save("qwen3", tmp_path / "model"))[0]
    assert same == []
    assert len(not_powers) == len(other_bytes) == 3
    assert not_powers[0] == "decoder.layers.0.self_attention.linear_proj.weight"


@pytest.mark.parametrize(("head_dim", "same"), [(128, True), (256, True), (64, False)])
def test_blocks_of_a_fused_matrix_are_those_of_its_parts(head_dim: int, same: bool) -> None:
    """q, k and v of a KV group over one another, of parts of whole blocks alone: what `eight_bits_are_the_same_on_both_sides` asks."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(rows * head_dim, 256, generator=generator) * scale
        for rows, scale in ((3, 0.02), (1, 3.0), (1, 0.5))
    ]
    fused, scales = naive(torch.cat(parts))
    rows = blocks.dequantize(fused, scales).split([len(part) for part in parts])
    alike = [torch.equal(blocks.dequantize(*naive(p)), row) for p, row in zip(parts, rows, strict=True)]
    assert all(alike) is same


WHOLE = ModelShape(
    *("qwen3_moe", 2, 256, 512, 4, 2, 128, 61, 64, False, 1e-6),
    qk_norm=True,
    moe=MoeShape(4, 2, 256, dense_layers=(0,)),
)
"""Of whole blocks on each of two tp ranks."""


def multiplied(layout: dict[str, Any], shape: ModelShape) -> dict[str, bool]:
    """Of each matrix that is sent in 8 bits, on this rank: whether what the layers multiply by, rounded in blocks of the matrices as they
    lie there, is what a rollout is sent, rounded in blocks of the model's own."""
    import torch.distributed as dist

    from quintet.engine import build
    from quintet.engine.weights.shards import shard_map
    from quintet.recipe import schema

    wanted = schema.Layout(**layout)
    mesh = build.mesh_of(wanted, dist.get_world_size())
    chunks = build.build_chunks(shape, wanted, mesh, torch.bfloat16, schema.Engine())
    shards = shard_map(chunks, shape, mesh)
    for shard in shards:
        shard.write(drawn(shard.name, shard.shape)[tuple(slice(*ends) for ends in shard.box)])
    for chunk in chunks:
        for name, weight in chunk.decoder.named_parameters():
            if weight.dim() > 1 and "router" not in name:
                for one in (
                    weight.data if weight.dim() == 3 else weight.data[None]
                ):  # experts are in one tensor
                    one.copy_(blocks.dequantize(*naive(one)))
    names, found = blocks.quantized_names(shape), {}
    for shard in shards:
        if shard.name in names:
            sent = blocks.dequantize(*naive(drawn(shard.name, shard.shape))).bfloat16()
            mine = sent[tuple(slice(*ends) for ends in shard.box)]
            found[shard.name] = torch.equal(shard.read(), mine)
    return found


@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2, "sp": True}, {"tp": 2, "sp": True, "ep": 2, "etp": 1}], ids=str
)
def test_a_rollout_is_sent_what_every_rank_multiplies_by(pool, layout: dict[str, Any]) -> None:
    told = pool.run(multiplied, layout.get("tp", 1), layout, WHOLE)
    assert {name for one in told for name in one} == blocks.quantized_names(WHOLE)
    assert all(all(one.values()) for one in told)


def test_of_parts_of_blocks_it_would_be_sent_others(pool) -> None:
    """What `eight_bits_are_the_same_on_both_sides` refuses: heads of 64."""
    (told,) = pool.run(multiplied, 1, {}, replace(WHOLE, head_dim=64))
    assert not told["model.layers.0.self_attn.k_proj.weight"]
    assert told["model.layers.0.self_attn.o_proj.weight"]
