"""The Triton kernel of sampling noise; `quintet.rollout.noise` defines what it computes, bit for bit up to the last logarithm."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 1024
"""Tokens a program."""


def exponential_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Compute `quintet.rollout.noise.exponential_noise` in one kernel. seeds, positions: int64 [n]. Returns fp32 [n, vocab]."""
    out = torch.empty(len(seeds), vocab_size, device=seeds.device)
    if out.numel():
        grid = (len(seeds), triton.cdiv(vocab_size, BLOCK))
        _noise_kernel[grid](seeds, positions, out, vocab_size, BLOCK=BLOCK)
    return out


@triton.jit
def _noise_kernel(seeds, positions, out, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.randint(tl.load(seeds + row), tl.load(positions + row))
    low, high, _, _ = tl.randint4x(key, token)
    bits = high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32 | low.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )
    uniform = ((bits ^ 0xFFFFFFFFFFFFFFFF) >> 1).to(tl.int64).to(tl.float32) * 1.0842021724855044e-19
    uniform = tl.minimum(tl.maximum(uniform, 5.421010862427522e-20), 0.9999999403953552)
    tl.store(out + row * vocab_size + token, -libdevice.log1p(-uniform), mask=token < vocab_size)
