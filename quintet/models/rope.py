"""Rotary frequencies in plain Python, so that planning and tests need no torch.

Sources: RoPE, https://arxiv.org/abs/2104.09864; position interpolation ("linear"),
https://arxiv.org/abs/2306.15595; the Llama 3.1 rule, https://arxiv.org/abs/2407.21783 and its released code.
"""

from __future__ import annotations

import math

from quintet.models.family import Rope


def inverse_frequencies(rope: Rope, rotary_dim: int) -> list[float]:
    """theta^(-2i/d) for i in 0 .. d/2 - 1, scaled as `rope.scaling` says. Radians per position."""
    frequencies = [rope.theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return [f / factor for f in frequencies]
    return [_llama3(f, scaling, factor) for f in frequencies]


def _llama3(frequency: float, scaling: dict, factor: float) -> float:
    """Slow waves are stretched by `factor`, fast ones kept, those between are blended."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    blend = (turns - low) / (high - low)
    return (1 - blend) * frequency / factor + blend * frequency
