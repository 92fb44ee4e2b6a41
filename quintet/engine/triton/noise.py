"""The Triton kernel of sampling noise; `quintet.rollout.noise` defines what it computes, bit for bit up to the last logarithm."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 256
"""Blocks of four tokens a program."""


def exponential_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Compute `quintet.rollout.noise.exponential_noise` in one kernel. seeds, positions: int64 [n]. Returns fp32 [n, vocab]."""
    out = torch.empty(len(seeds), vocab_size, device=seeds.device)
    if out.numel():
        grid = (len(seeds), triton.cdiv(vocab_size, 4 * BLOCK))
        _noise_kernel[grid](seeds, positions, out, vocab_size, BLOCK=BLOCK)
    return out


@triton.jit
def _noise_kernel(seeds, positions, out, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.uint64)
    a, b = (block + 1).to(tl.uint64), zero + tl.load(positions + row).to(tl.uint64)
    c, d = zero, zero
    first, second = zero + tl.load(seeds + row).to(tl.uint64), zero
    first_multiplier, second_multiplier = zero + 0xD2E7470EE14C6C93, zero + 0xCA5A826395121157
    for _ in tl.static_range(10):
        high, low = tl.umulhi(first_multiplier, a), first_multiplier * a
        higher, lower = tl.umulhi(second_multiplier, c), second_multiplier * c
        a, b, c, d = higher ^ b ^ first, lower, high ^ d ^ second, low
        first += 0x9E3779B97F4A7C15
        second += 0xBB67AE8584CAA73B
    _store(a, block * 4, out + row * vocab_size, vocab_size)
    _store(b, block * 4 + 1, out + row * vocab_size, vocab_size)
    _store(c, block * 4 + 2, out + row * vocab_size, vocab_size)
    _store(d, block * 4 + 3, out + row * vocab_size, vocab_size)


@triton.jit
def _store(bits, token, out, vocab_size):
    uniform = (bits >> 1).to(tl.int64).to(tl.float32) * 1.0842021724855044e-19
    uniform = tl.minimum(tl.maximum(uniform, 5.421010862427522e-20), 0.9999999403953552)
    tl.store(out + token, -libdevice.log1p(-uniform), mask=token < vocab_size)
