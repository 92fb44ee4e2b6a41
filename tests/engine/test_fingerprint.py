"""Fingerprints add up over any cutting of a tensor, and tell of every change."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from quintet.engine.device import _HAS_TRITON
from quintet.engine.weights import fingerprint as room
from quintet.engine.weights.fingerprint import fingerprint, fingerprints
from quintet.engine.weights.hashing import GOLDEN, mix
from quintet.engine.weights.shards import whole
from quintet.errors import SyncMismatch
from quintet.models import ModelShape, Weight
from quintet.models.mcore import Box, volume, whole_box
from quintet.models.weight import Stack

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernel runs on GPUs")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
TYPES = [
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
_WORD = 1 << 64


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, device: Any = "cpu") -> torch.Tensor:
    """Any bit patterns: NaN, infinities and both zeros are among them."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    size = (*shape[:-1], shape[-1] * dtype.itemsize) if shape else (dtype.itemsize,)
    raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape).to(device)


def full(shape: tuple[int, ...]) -> Box:
    return whole_box(shape)


def of(tensor: torch.Tensor) -> int:
    shape = tuple(tensor.shape)
    return int(fingerprint(tensor, shape, full(shape)))


def written_out(tensor: torch.Tensor) -> int:
    """The formula, element by element, in Python's numbers."""
    columns = tensor.shape[-1] if tensor.dim() else 1
    weights = [
        [int(mix(torch.tensor(n) * GOLDEN + salt)) | 1 for n in range(count)]
        for count, salt in ((tensor.numel() // columns, room.SALTS[0]), (columns, room.SALTS[1]))
    ]
    width = tensor.element_size()
    raw = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).view(-1, width).tolist()
    bits = [int.from_bytes(bytes(one), "little") for one in raw]
    total = sum(b * weights[0][i // columns] * weights[1][i % columns] for i, b in enumerate(bits)) % _WORD
    return total - _WORD if total >= _WORD // 2 else total


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(7, 24), (5,), (3, 4, 8), (1, 1), ()])
def test_the_formula(device, dtype, shape):
    tensor = drawn(shape, dtype, device)
    if device == "cuda":
        assert _HAS_TRITON
    assert of(tensor) == written_out(tensor)


@st.composite
def cuttings(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that cover it once: the product of cuts along each dim."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    cuts = []
    for n in shape:
        at = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))})
        cuts.append(list(itertools.pairwise(at)))
    return shape, list(itertools.product(*cuts))


MIDDLES = (3, 4, 4), [((0, 3), ends, (0, 4)) for ends in ((0, 1), (1, 2), (2, 4))]
"""Of which copies lie in memory as if the tensor had fewer dims, or smaller ones."""


@given(
    cuttings(),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]),
    st.integers(1, 50),
    st.integers(0, 9),
)
@example(MIDDLES, torch.float32, 50, 9)
def test_parts_add_up_to_the_whole(cutting, dtype, chunk, kept):
    shape, boxes = cutting
    tensor = drawn(shape, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "CHUNK", chunk)
        patch.setattr(room, "KEPT", kept)
        views = [tensor[tuple(slice(*r) for r in box)] for box in boxes]
        for parts in (views, [view.contiguous() for view in views]):
            found = [fingerprint(part, shape, box) for part, box in zip(parts, boxes, strict=True)]
            assert int(sum(found)) == of(tensor) == written_out(tensor)


def test_the_hash_is_splitmix64():
    """The numbers that Java's SplittableRandom and others have from the seed 1234567."""
    found = mix(1234567 + GOLDEN * torch.arange(1, 4)).tolist()
    assert [one % _WORD for one in found] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.integers(0, 63), st.integers(0, 31))
def test_every_flipped_bit_is_found(element, bit):
    tensor = drawn((8, 8), torch.float32)
    changed = tensor.clone()
    changed.view(torch.int32).view(-1)[element] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    assert of(changed) != of(tensor)


def exchanged(x: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    out = x.clone()
    out[a], out[b] = x[b], x[a]
    return out


MISTAKES = {
    "two elements swapped": lambda x: exchanged(x, (1, 2), (5, 3)),
    "two elements of a row swapped": lambda x: exchanged(x, (1, 2), (1, 3)),
    "two elements of a column swapped": lambda x: exchanged(x, (1, 2), (4, 2)),
    "two rows swapped": lambda x: exchanged(x, 3, 6),
    "transposed": lambda x: x.T.contiguous(),
    "shifted by a row": lambda x: x.roll(1, 0),
    "shifted by a column": lambda x: x.roll(1, 1),
    "shifted by an element": lambda x: x.flatten().roll(1).view_as(x),
    "halves swapped": lambda x: x.roll(len(x) // 2, 0),
    "reversed": lambda x: x.flip(0),
    "a row lost": lambda x: torch.cat((x[:3], x[4:], torch.zeros_like(x[:1]))),
    "a sign": lambda x: torch.where(torch.arange(x.numel()).view(x.shape) == 9, -x, x),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mistakes_are_found(mistake, dtype):
    tensor = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert of(MISTAKES[mistake](tensor)) != of(tensor)


def test_experts_swapped_within_their_stack_are_found():
    stack = drawn((6, 4, 8))
    assert of(exchanged(stack, 1, 4)) != of(stack)


def test_minus_zero_is_another_number():
    assert of(torch.tensor([0.0, 1.0])) != of(torch.tensor([-0.0, 1.0]))


SHAPE = ModelShape("qwen3", 1, 16, 24, 8, 4, 4, 32, 32, False, 1e-6)
HELD = {
    "qkv": (Weight("w", ("q", "k", "v"), ((32, 16), (16, 16), (16, 16)), "qkv"), (64, 16)),
    "qkv bias": (Weight("w", ("q", "k", "v"), ((32,), (16,), (16,)), "qkv"), (64,)),
    "gate and up": (Weight("w", ("gate", "up"), ((24, 16), (24, 16)), "gate_up"), (48, 16)),
    "halves swapped": (Weight("w", ("eh",), ((16, 32),), "rows_halves_swapped"), (16, 32)),
    "a transposed stack": (
        Weight("w", ("gu",), ((8, 16), (8, 16)), "expert_gate_up", stack=Stack(2, 3, True, True)),
        (16, 16),
    ),
    "a stack": (
        Weight("w", ("gu",), ((8, 16), (8, 16)), "expert_gate_up", stack=Stack(2, 3)),
        (16, 16),
    ),
    "a stack's bias": (
        Weight("w", ("b",), ((8,), (8,)), "expert_gate_up", stack=Stack(1, 3, True, True)),
        (16,),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", HELD)
def test_views_of_the_shard_map(case, device):
    """Interleaved and strided views count like the plain tensors that Hugging Face names."""
    weight, held = HELD[case]
    for shard in whole(weight, drawn(held, device=device), SHAPE):
        assert volume(shard.box) == shard.view.numel()
        plain = torch.zeros(shard.shape, dtype=torch.bfloat16)
        plain[tuple(slice(*r) for r in shard.box)] = shard.read().cpu()
        assert int(fingerprint(shard.view, shard.shape, shard.box)) == written_out(plain)


@pytest.mark.parametrize("device", DEVICES)
def test_many_at_once(device, monkeypatch):
    launched = []
    if device == "cpu":  # as on a GPU, but for the kernel

        def fused(parts: Any) -> torch.Tensor:
            launched.append(sum(tensor.nbytes for tensor, _ in parts[:-1]))
            return torch.stack([room._plain(*part) for part in parts])

        monkeypatch.setattr(room, "runs_fused", lambda tensor: tensor.dtype != torch.uint8)
        monkeypatch.setattr(room, "_fused", fused)
    monkeypatch.setattr(room, "BATCH_BYTES", 4000)
    shapes = [(1, 1), (1, 5), (70, 1030), (3,), (130, 64), (2, 3, 1100), (64, 1024), (40, 2048)]
    tensors = [drawn(s, t, device) for s in shapes for t in (torch.bfloat16, torch.float32, torch.uint8)]
    tensors += [drawn((64, 96), device=device).T, drawn((6, 32, 40), device=device).permute(2, 0, 1)]
    tensors += [drawn((4, 6, 8, 10), device=device)[:, ::2, 1:, ::3]]
    items = [(f"{i}", tuple(t.shape), full(tuple(t.shape)), t) for i, t in enumerate(tensors)]
    found = fingerprints(items)
    assert 1 < len(launched) < len(tensors) / 2 or device == "cuda"
    assert all(before <= 4000 for before in launched)
    monkeypatch.undo()
    assert [found[name, box] for name, _, box, _ in items] == [of(t.cpu()) for t in tensors]


def test_empty_parts_have_none():
    box = ((4, 4), (0, 3))
    assert int(fingerprint(torch.empty(0, 3), (4, 3), box)) == 0
    assert fingerprints([("w", (4, 3), box, torch.empty(0, 3))]) == {}
    assert fingerprints([]) == {}


def test_copies_on_one_rank_must_agree():
    one = drawn((2, 3))
    item = ("w", (2, 3), full((2, 3)), one)
    assert len(fingerprints([item, item])) == 1
    with pytest.raises(SyncMismatch, match="w: two copies"):
        fingerprints([item, ("w", (2, 3), full((2, 3)), one.flip(0))])


@pytest.mark.parametrize("box", [((0, 2), (0, 2)), ((0, 6),), ((0, 2), (0, 3), (0, 1))])
def test_a_tensor_that_cannot_hold_the_box_is_refused(box):
    with pytest.raises(ValueError, match="cannot hold"):
        fingerprint(torch.zeros(2, 3), (2, 3), box)


def test_dims_across_the_boxs_are_refused():
    with pytest.raises(ValueError, match="across"):
        fingerprint(torch.zeros(3, 4), (4, 3), ((0, 4), (0, 3)))
