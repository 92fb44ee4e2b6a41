"""Sampling noise keyed by (seed, position): whoever else is in the batch, in whatever slot or order, cannot change it.

The bits are Philox 4x64 with ten rounds (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405): a block of four tokens at a
position is a function of key (seed, 0) and counter (1 + token // 4, position, 0, 0), so that nothing is kept between draws and any
token's noise can be had alone. One function for all back ends that let us: written here for CPUs, and in
`quintet.engine.triton.noise` for GPUs, bit for bit the same.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quintet.engine.device import runs_fused, upload

Words = NDArray[np.uint64]

ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
LANES = 4
"""Tokens of a block."""
SMALLEST, BELOW_ONE = 2.0**-64, 1 - 2.0**-24
"""Of uniform numbers. The noise of 0 is 0, that of 1, the next in fp32, infinite."""

_STREAMED = 1024
"""Vocabularies from this size on are drawn by numpy's generator, a row at a time: far faster a token, and 25 µs a row."""


def exponential_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return Exponential(1) noise, fp32 [n, vocab], a function of (seed, position, token) alone. seeds, positions: int64 [n].

    Small values, which decide who wins, have fp32's full precision down to 2⁻⁶³, so that tokens of probability 1e-15 are drawn as
    often as they should be. The largest is 16.6.
    """
    if runs_fused(seeds):
        from quintet.engine.triton.noise import exponential_noise as fused

        return fused(seeds, positions, vocab_size)
    bits = noise_bits(seeds.cpu().numpy(), positions.cpu().numpy(), vocab_size)
    bits >>= np.uint64(1)
    uniform = torch.from_numpy(bits.view(np.int64)).float().mul_(2.0**-63).clamp_(SMALLEST, BELOW_ONE)
    return upload(uniform.neg_().log1p_().neg_(), seeds.device)


def noise_bits(seeds: NDArray[np.int64], positions: NDArray[np.int64], vocab_size: int) -> Words:
    """Return the 64 bits of each (seed, position, token), uint64 [n, vocab]."""
    blocks = -(-vocab_size // LANES)
    keys, at = seeds.astype(np.uint64), positions.astype(np.uint64)
    if vocab_size >= _STREAMED:
        bits = np.empty((len(keys), blocks * LANES), np.uint64)
        for row, key, position in zip(bits, keys, at, strict=True):
            keyed, counted = np.array((key, 0), np.uint64), np.array((0, position, 0, 0), np.uint64)
            row[:] = np.random.Philox(key=keyed, counter=counted).random_raw(len(row))
    else:
        shape = (len(keys), blocks)
        counters = np.broadcast_to(np.arange(1, blocks + 1, dtype=np.uint64), shape)
        zeros = np.zeros(shape, np.uint64)
        words = philox((counters, np.broadcast_to(at[:, None], shape), zeros, zeros), (keys[:, None], zeros))
        bits = np.stack(words, axis=-1).reshape(len(keys), -1)
    return bits[:, :vocab_size]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Return the four words of each block. All of one shape, or such as broadcast."""
    a, b, c, d = counter
    with np.errstate(over="ignore"):
        for n in range(ROUNDS):
            first, second = (k + np.uint64(n * step % 2**64) for k, step in zip(key, KEY_STEPS, strict=True))
            (high, low), (higher, lower) = _product(MULTIPLIERS[0], a), _product(MULTIPLIERS[1], c)
            a, b, c, d = higher ^ b ^ first, lower, high ^ d ^ second, low
    return a, b, c, d


def _product(constant: int, x: Words) -> tuple[Words, Words]:
    """Both halves of the 128 bits of a product."""
    half = np.uint64(32)
    low, high = x & np.uint64(0xFFFFFFFF), x >> half
    a, b = np.uint64(constant & 0xFFFFFFFF), np.uint64(constant >> 32)
    middle = a * high + (a * low >> half)
    carry = b * low + (middle & np.uint64(0xFFFFFFFF))
    return b * high + (middle >> half) + (carry >> half), x * np.uint64(constant)
