"""Directories in 8 bits with scales of 128 × 128 blocks, as DeepSeek-V3 is published: every rank gets its part of each matrix, wherever
its slices begin."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, Qwen3Config

from quintet.engine.convert import hf_to_mcore, mcore_to_hf
from quintet.engine.weights import fp8, hf_read
from quintet.errors import UserError
from quintet.models import check_weights, read_shape
from quintet.models.weights_on_disk import find_weights, fingerprint
from tests.engine import mtp_models
from tests.oracle.models import hub_names, of_config

QUANTIZED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_SIZES: dict[str, Any] = {"vocab_size": 96, "max_position_embeddings": 64, "num_hidden_layers": 2}
CONFIGS = {  # rows and columns of a rank's slice begin and end within blocks
    "deepseek_v3": DeepseekV3Config(
        hidden_size=320,
        intermediate_size=600,
        moe_intermediate_size=200,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=160,
        kv_lora_rank=136,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=40,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        **_SIZES,
    ),
    "qwen3": Qwen3Config(
        hidden_size=200,
        intermediate_size=600,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=72,
        tie_word_embeddings=False,
        **_SIZES,
    ),
}


def by_hand(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits and its scales, block after block."""
    rows, columns = matrix.shape
    numbers = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    scales = torch.empty(math.ceil(rows / 128), math.ceil(columns / 128))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            where = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = matrix[where].abs().max() / 448 * (1 + 0.1 * i + 0.01 * j)
            numbers[where] = (matrix[where] / scales[i, j]).to(torch.float8_e4m3fn)
    return numbers, scales


def save(name: str, path: Path, scales_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write a model in 8 bits; return what its tensors are."""
    made = of_config(CONFIGS[name])
    path.mkdir()
    config = made.config.to_dict() | {"architectures": [type(made).__name__]}
    (path / "config.json").write_text(json.dumps(config, default=str))
    tensors = {key: one.detach().contiguous() for key, one in hub_names(made.state_dict().items()).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return in_eight_bits(path, scales_dtype)


def in_eight_bits(path: Path, scales_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Put the linear layers of a directory into 8 bits; return what its tensors are then."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    tensors, meant = {}, {}
    for key, tensor in load_file(path / "model.safetensors").items():
        if key.endswith(("_proj.weight", "_with_mqa.weight")) and "eh_proj" not in key:
            numbers, scales = by_hand(tensor.float())
            scales = scales.to(scales_dtype)
            wide = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            meant[key] = numbers.float() * wide[: len(tensor), : tensor.shape[1]]
            tensors |= {key: numbers, f"{key}_scale_inv": scales}
        else:
            tensors[key] = meant[key] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return meant


def held(path: Path, layout: dict[str, Any], dtype: str) -> list[tuple[str, Any, Tensor]]:
    """On one rank: what it holds after loading, by name and box."""
    from quintet.engine.engine import Engine
    from quintet.recipe import schema

    engine = Engine(
        read_shape(path), schema.Layout(**layout), engine=schema.Engine(), optimizer=None, dtype=dtype
    )
    engine.load_hf(path)
    return [(one.name, one.box, one.read().cpu().clone()) for one in engine.shard_map()]


def wrong(found: list[list[tuple[str, Any, Tensor]]], meant: dict[str, Tensor]) -> list[str]:
    """Names of what is not, on some rank, bit for bit the part that it should be in its type."""
    out = []
    for name, box, tensor in (one for rank in found for one in rank):
        part = meant[name][tuple(slice(*range_) for range_ in box)].to(tensor.dtype)
        if not torch.equal(part, tensor):
            out.append(name)
    return out


LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2, "sp": True}),
    "pp2-uneven": (2, {"pp": 2, "stage_layers": [2, 0]}),
}
OF_EXPERTS = {
    "ep2-tp2": (2, {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
    "tp4-etp4": (4, {"tp": 4, "sp": True, "etp": 4}),
    "pp2-etp2": (4, {"tp": 2, "sp": True, "pp": 2, "etp": 2}),
}


@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [
        *(("qwen3", layout, dtype) for layout in LAYOUTS for dtype in ("fp32", "bf16")),
        *(("deepseek_v3", layout, "bf16") for layout in (*LAYOUTS, *OF_EXPERTS)),
    ],
)
def test_ranks_hold_what_blocks_say(pool, tmp_path, family, layout, dtype):
    meant = save(family, tmp_path / "model")
    world, sizes = (LAYOUTS | OF_EXPERTS)[layout]
    found = pool.run(held, world, tmp_path / "model", sizes, dtype)
    assert {name for rank in found for name, _, _ in rank} == set(meant)
    assert wrong(found, meant) == []


def test_scales_in_bf16_and_small_pieces(pool, tmp_path):
    """Qwen3's are; pieces begin within blocks, and, of one row each, at a column other than 0."""
    meant = save("qwen3", tmp_path / "model", torch.bfloat16)
    found = pool.run(in_small_pieces, 2, tmp_path / "model", {"tp": 2})
    assert wrong(found, meant) == []


def in_small_pieces(path: Path, layout: dict[str, Any]) -> list[tuple[str, Any, Tensor]]:
    with mock.patch.object(hf_read, "CHUNK_BYTES", 800):
        return held(path, layout, "fp32")


def read_of_scales(path: Path, rows: int) -> dict[str, int]:
    """On one rank: bytes that were read of the scales of each matrix, of which so many rows of 200 are read at once."""
    counted: dict[str, int] = dict.fromkeys(find_weights(path).tensors, 0)
    original = hf_read.HfReader._read_parts

    def count(reader: Any, piece: Any, parts: list[memoryview], start: int) -> None:
        name = piece.shard.name.removesuffix(fp8.SCALE)
        counted[name] += sum(map(len, parts)) if name != piece.shard.name else 0
        original(reader, piece, parts, start)

    with (
        mock.patch.object(hf_read.HfReader, "_read_parts", count),
        mock.patch.object(hf_read, "CHUNK_BYTES", rows * 200 * 8),
    ):
        held(path, {}, "fp32")
    return counted


def test_of_scales_a_piece_reads_its_own_rows(pool, tmp_path):
    """A matrix of 600 rows in six pieces: they meet one or two of the five rows of blocks, ten together. In five, each meets its own."""
    save("qwen3", tmp_path / "model")
    for rows, met in ((100, 10), (128, 5)):
        (read,) = pool.run(read_of_scales, 1, tmp_path / "model", rows)
        assert read["model.layers.0.mlp.gate_proj.weight"] == met * 2 * 4


def _transposed(original, numbers, scales, first=(0, 0)):
    down, across = scales.shape
    return original(numbers, scales.t().reshape(down, across), first)


def _own_blocks(original, numbers, scales, first=(0, 0)):
    """Blocks counted from where the slice begins."""
    return original(numbers, scales)


def _rounded_down(original, numbers, scales, first=(0, 0)):
    """The ragged edge takes the scale of the whole block before it."""
    down, across = (max(1, size - 1) for size in scales.shape)
    rows = torch.arange(len(scales)).clamp(max=down - 1)
    columns = torch.arange(scales.shape[1]).clamp(max=across - 1)
    return original(numbers, scales[rows][:, columns], first)


def _no_scale(original, numbers, scales, first=(0, 0)):
    return numbers.float()


MISTAKES = {one.__name__: one for one in (_transposed, _own_blocks, _rounded_down, _no_scale)}


def mistaken(name: str, *args: Any) -> list[tuple[str, Any, Tensor]]:
    original = fp8.dequantize
    with mock.patch.object(fp8, "dequantize", lambda *a: MISTAKES[name](original, *a)):
        return held(*args)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_with_blocks_are_found(pool, tmp_path, mistake):
    meant = save("deepseek_v3", tmp_path / "model")
    found = pool.run(mistaken, 2, mistake, tmp_path / "model", {"tp": 2, "sp": True, "etp": 2}, "bf16")
    assert len(set(wrong(found, meant))) > 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(KEY + "_scale_inv"), "in 8 bits, and .*_scale_inv with the scales of its 128 × 128 blocks is"),
        (lambda t: t.update({KEY + "_scale_inv": t[KEY + "_scale_inv"].t().contiguous()}), r"has shape \(2, 5\)"),
        (lambda t: t.update({KEY + "_scale_inv": t[KEY + "_scale_inv"][:4]}), r"have scales of shape \(5, 2\)"),
        (lambda t: t.update({KEY + "_scale_inv": t[KEY + "_scale_inv"].half()}), "is of type F16"),
        (lambda t: t.update({KEY: t[KEY].to(torch.bfloat16)}), "left over: .*gate_proj.weight_scale_inv"),
        (lambda t: t.update({KEY: t[KEY].to(torch.float8_e5m2)}), "F8_E5M2|left over"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(tmp_path, change, said):
    save("qwen3", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(UserError, match=said):
        check_weights(tmp_path / "model", read_shape(tmp_path / "model"))


KEY = "model.layers.1.mlp.gate_proj.weight"


def test_other_scales_are_another_model(tmp_path):
    save("qwen3", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    before, tensors = fingerprint(find_weights(tmp_path / "model")), load_file(file)
    tensors[KEY + "_scale_inv"] *= 1.5
    save_file(tensors, file)
    assert fingerprint(find_weights(tmp_path / "model")) != before


def test_a_scale_that_is_not_finite_is_named(pool, tmp_path):
    save("qwen3", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors[KEY + "_scale_inv"][1, 1] = math.inf
    save_file(tensors, file)
    with pytest.raises(Exception, match=r"gate_proj\.weight_scale_inv holds values that are not finite"):
        pool.run(held, 1, tmp_path / "model", {}, "bf16")


def test_saved_models_and_conversions_are_in_bf16(tmp_path):
    """And say nothing of 8 bits, with which others would read them wrongly."""
    meant = save("deepseek_v3", tmp_path / "model")
    hf_to_mcore(tmp_path / "model", tmp_path / "mcore", tp=2)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "again")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert set(found) == set(meant)
    for name, tensor in found.items():
        assert torch.equal(tensor, meant[name].to(tensor.dtype)), name
    assert found["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


def trained_and_saved(path: Path, out: Path) -> None:
    from quintet.engine.engine import Engine
    from quintet.recipe import schema

    shape = read_shape(path).without_mtp()
    engine = Engine(shape, schema.Layout(), engine=schema.Engine(), optimizer=None, dtype="bf16")
    engine.load_hf(path)
    engine.save_hf(out, path)


def test_layers_that_are_taken_along_are_in_bf16(pool, tmp_path):
    path = mtp_models.save("deepseek_v3", tmp_path / "model")
    meant = in_eight_bits(path)
    pool.run(trained_and_saved, 1, path, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    ahead = [name for name in found if name.startswith(f"model.layers.{read_shape(path).layers}.")]
    assert ahead
    assert not any(name.endswith("_scale_inv") for name in found)
    for name in ahead:
        assert torch.equal(found[name], meant[name].to(found[name].dtype)), name
    assert find_weights(tmp_path / "out").tensors.keys() == find_weights(path).tensors.keys()
    check_weights(tmp_path / "out", read_shape(tmp_path / "out"))
