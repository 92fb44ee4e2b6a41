"""Sampling noise keyed by (seed, position): whoever else is in the batch, in whatever slot or order, cannot change it.

The bits are those of vLLM's second model runner, so that a request draws the same tokens in both: Philox 4x32 with ten rounds (Salmon et
al. 2011, https://doi.org/10.1145/2063384.2063405), twice. The first word of key `seed` and counter `position` is the key of a position,
and of that key and counter `token` the first two words are the token's. Nothing is kept between draws, and any token's noise can
be had alone. One function for all back ends that let us: written here for CPUs, and in `quintet.engine.triton.noise` for GPUs, bit
for bit the same.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quintet.engine.device import runs_fused, upload

Words = NDArray[np.uint64]
"""Of 32 bits each, but for those of `noise_bits`: numpy has no product of two uint32 that keeps all bits."""

ROUNDS = 10
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
SMALLEST, BELOW_ONE = 2.0**-64, 1 - 2.0**-24
"""Of uniform numbers. The noise of 0 is 0, that of 1, the next in fp32, infinite."""
CACHED = 8192
"""Words whose ten rounds stay in a core's cache: twice as fast a token as all of a large vocabulary at once."""


def exponential_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return Exponential(1) noise, fp32 [n, vocab], a function of (seed, position, token) alone. seeds: int64 [n]. positions: of the
    last token that is known, from 0, int64 [n].

    Small values, which decide who wins, have fp32's full precision down to 2⁻⁶³, so that tokens of probability 1e-15 are drawn as
    often as they should be. The largest is 16.6.
    """
    if runs_fused(seeds):
        from quintet.engine.triton.noise import exponential_noise as fused

        return fused(seeds, positions, vocab_size)
    bits = noise_bits(seeds.cpu().numpy(), positions.cpu().numpy(), vocab_size)
    np.invert(bits, out=bits)  # vLLM's noise is the logarithm of the number itself
    bits >>= np.uint64(1)
    uniform = torch.from_numpy(bits.view(np.int64)).float().mul_(2.0**-63).clamp_(SMALLEST, BELOW_ONE)
    return upload(uniform.neg_().log1p_().neg_(), seeds.device)


def draw_tokens(logprobs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token from each row of log-probs [n, vocab], int64 [n]. seeds, positions: as of `exponential_noise`.

    The Gumbel-max trick: argmax over tokens of log p + g, with g independent Gumbel noise, is a draw from p
    (Gumbel 1954). Written as log p - log e with e exponential, it keeps full precision where it matters.
    """
    return exponential_noise(seeds, positions, logprobs.shape[1]).log_().sub_(logprobs).argmin(-1)


def noise_bits(seeds: NDArray[np.int64], positions: NDArray[np.int64], vocab_size: int) -> Words:
    """Return the 64 bits of each (seed, position, token), uint64 [n, vocab]."""
    keys, at = seeds.astype(np.uint64), positions.astype(np.uint64)
    nothing = np.uint64(0)
    drawn, *_ = philox((at & LOW, at >> WORD, nothing, nothing), (keys & LOW, keys >> WORD))
    bits = np.empty((len(keys), vocab_size), np.uint64)
    rows = max(1, CACHED // max(1, vocab_size))
    for row in range(0, len(keys), rows):
        key = drawn[row : row + rows, None]
        for start in range(0, vocab_size, CACHED):
            tokens = np.arange(start, min(start + CACHED, vocab_size), dtype=np.uint64)[None]
            low, high, *_ = philox((tokens, nothing, nothing, nothing), (key, nothing))
            bits[row : row + rows, start : start + CACHED] = high << WORD | low
    return bits


def philox(
    counter: tuple[Words | np.uint64, ...], key: tuple[Words | np.uint64, Words | np.uint64]
) -> tuple[Words, ...]:
    """Return the four words of each block. counter: four words; key: two; all of one shape, or such as broadcast."""
    a, b, c, d = counter
    for n in range(ROUNDS):
        first, second = (
            k + np.uint64(n * step & 0xFFFFFFFF) & LOW for k, step in zip(key, KEY_STEPS, strict=True)
        )
        one, other = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = other >> WORD ^ b ^ first, other & LOW, one >> WORD ^ d ^ second, one & LOW
    return a, b, c, d  # type: ignore[return-value]
