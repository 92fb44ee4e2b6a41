"""Matrices in blocks of 8 bits: what a naive loop says, within the format's error."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintet.engine.engine import DTYPES
from quintet.engine.weights import fp8
from quintet.engine.weights.fp8 import (
    BLOCK,
    DTYPE,
    LARGEST,
    SCALE,
    dequantize,
    quantize,
    quantized_names,
    scales_shape,
)
from quintet.models import read_shape
from tests.oracle.models import save
from tests.patience import BUSY
from tests.sync import layouts

FP32_MAX = np.finfo(np.float32).max


def by_hand(largest: float) -> float:
    """The scale of a block, as TransformerEngine's recipe has it: one over the power of two below 448 / largest in fp32."""
    if largest == 0 or not math.isfinite(largest):
        return 1.0
    bits = struct.unpack("<I", struct.pack("<f", min(np.float32(448) / np.float32(largest), FP32_MAX)))[0]
    return 2.0 ** (127 - (bits >> 23))


def naive(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block, as the format is defined."""
    quantized, scales = torch.empty(matrix.shape, dtype=DTYPE), torch.empty(scales_shape(matrix.shape))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            block = matrix[at].float()
            scale = by_hand(float(block.abs().max()))
            quantized[at] = (block * (1 / scale)).clamp(-LARGEST, LARGEST).to(DTYPE)
            scales[i, j] = scale
    return quantized, scales


def quantized_of(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, scales = torch.empty(matrix.shape, dtype=DTYPE), torch.empty(scales_shape(matrix.shape))
    quantize(matrix, quantized, scales)
    return quantized, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(128, 128), (1, 1), (384, 256), (200, 300), (127, 513), (700, 300)])
def test_blocks_are_those_of_a_naive_loop(size, dtype, monkeypatch):
    monkeypatch.setattr(fp8, "CHUNK_BLOCKS", 4)  # the largest takes several turns
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(size, generator=generator) * torch.rand(size[0], 1, generator=generator).exp() * 0.02
    matrix = matrix.to(dtype)
    (quantized, scales), (expected, of_blocks) = quantized_of(matrix), naive(matrix)
    assert torch.equal(scales, of_blocks)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    # Three bits of mantissa: half a step of 1/8 of the number, or of the smallest steps below the normal range.
    error = (dequantize(quantized, scales) - matrix.float()).abs()
    smallest = (
        scales.repeat_interleave(BLOCK, 0)[: size[0]].repeat_interleave(BLOCK, 1)[:, : size[1]] * 2**-10
    )
    assert (error <= matrix.float().abs() / 16 * 1.001 + smallest).all()


def test_zeros_and_extremes_stay_finite():
    matrix = torch.zeros(130, 260)
    matrix[0, 0], matrix[129, 259] = 3e38, 1e-38
    quantized, scales = quantized_of(matrix)
    assert torch.isfinite(dequantize(quantized, scales)).all()
    assert scales[0, 1] == 1
    assert LARGEST / 2 <= quantized[0, 0].float() <= LARGEST
    assert fp8.scale_of(torch.tensor([0.0, torch.inf, torch.nan])).tolist() == [1, 1, 1]


@given(st.floats(2**-118, 2.0**127, width=32))
def test_a_scale_is_a_power_of_two_that_uses_the_range(largest):
    """Within the range, and not by a factor of two too large; 448 · 2^k itself is on the border."""
    (scale,) = fp8.scale_of(torch.tensor([largest])).tolist()
    assert scale == by_hand(largest)
    assert math.frexp(scale)[0] == 0.5
    assert LARGEST / 2 * (1 - 2**-23) < largest / scale <= LARGEST * (1 + 2**-23)


@pytest.mark.parametrize("power", [-30, -1, 0, 1, 20])
def test_the_largest_number_of_the_type_fills_it(power):
    (scale,) = fp8.scale_of(torch.tensor([LARGEST * 2.0**power])).tolist()
    assert scale == 2.0**power


def test_another_rule_for_scales_is_seen(monkeypatch):
    """Planted: largest / 448, as DeepSeek-V3's own files have it."""
    monkeypatch.setattr(fp8, "scale_of", lambda largest: torch.where(largest > 0, largest / LARGEST, 1.0))
    with pytest.raises(AssertionError):
        test_blocks_are_those_of_a_naive_loop((384, 256), torch.bfloat16, monkeypatch)


def test_only_matrices_of_the_layers_are_quantized(tmp_path):
    names = quantized_names(read_shape(save("qwen3_moe", tmp_path / "moe")))
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.layers.3.mlp.experts.7.down_proj.weight" in names
    assert not any(word in name for name in names for word in ("norm", "embed", "lm_head", "mlp.gate.weight"))


def sent(path: Path, layout: dict[str, Any]) -> dict[str, tuple[str, torch.Tensor]]:
    """On one rank: what the neighbour sends in 8 bits, types and numbers."""
    import torch.distributed as dist

    from quintet.sync.server import ReceiverSpec, WeightServer

    engine = layouts.engine_of(path, layout)
    where = (engine.shape, DTYPES["fp32"], torch.device("cpu"), layouts.BUCKET_MIB)
    server = WeightServer(engine.shard_map, *where, quantization="fp8", timeout_s=30.0 * BUSY)
    found: dict[str, tuple[str, torch.Tensor]] = {}
    spec = ReceiverSpec(f"rollout {dist.get_rank()}", None, True)

    def keep(piece: Any) -> None:
        found[piece.name] = str(piece.tensor.dtype), piece.tensor.float().clone()

    layouts.exchange(server, spec, keep)
    server.close()
    return found


@pytest.mark.slow
def test_a_rollout_in_8_bits_gets_matrices_and_scales(pool, tmp_path):
    from safetensors.torch import load_file

    path = save("qwen3_moe", tmp_path / "moe")
    found = pool.run(sent, 2, path, {"ep": 2})[0]
    expected: dict[str, torch.Tensor] = {}
    names = quantized_names(read_shape(path))
    for name, tensor in load_file(path / "model.safetensors").items():
        expected[name] = tensor
        if name in names:
            expected[name], expected[name + SCALE] = naive(tensor)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        dtype, numbers = found[name]
        assert dtype == str(tensor.dtype), name
        assert torch.equal(numbers, tensor.float()), name
