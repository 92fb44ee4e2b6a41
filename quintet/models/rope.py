"""Rotary frequencies in plain Python, so that planning and tests need no torch.

Sources: RoPE, https://arxiv.org/abs/2104.09864; position interpolation ("linear"),
https://arxiv.org/abs/2306.15595; the Llama 3.1 rule, https://arxiv.org/abs/2407.21783 and its released code;
YaRN, https://arxiv.org/abs/2309.00071, with DeepSeek's mscale and mscale_all_dim as transformers computes them.
"""

from __future__ import annotations

import math

from quintet.models.shape import ModelShape, Rope


def inverse_frequencies(rope: Rope, rotary_dim: int) -> list[float]:
    """Return the inverse frequencies theta^(-2i/d) for i in 0 .. d/2 - 1, scaled as `rope.scaling` says. Radians per position."""
    frequencies = [rope.theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return [f / factor for f in frequencies]
    if scaling["rope_type"] == "yarn":
        return _yarn(frequencies, rope.theta, scaling, factor)
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


def _yarn(frequencies: list[float], theta: float, scaling: dict, factor: float) -> list[float]:
    """Fast waves are kept, slow ones stretched by `factor`, with a linear ramp over the dims between."""
    dim, original = 2 * len(frequencies), scaling["original_max_position_embeddings"]

    def dim_of(turns: float) -> float:
        """The dim whose wave makes so many turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(scaling.get("beta_fast") or 32.0), dim_of(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001
    out = []
    for i, f in enumerate(frequencies):
        stretched = min(max((i - low) / span, 0.0), 1.0)
        out.append(f / factor * stretched + f * (1.0 - stretched))
    return out


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rotary_scale(rope: Rope) -> float:
    """Return what YaRN multiplies cos and sin by; 1 for every other kind."""
    scaling = rope.scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return _mscale(scaling["factor"], mscale) / _mscale(scaling["factor"], all_dim)
    return _mscale(scaling["factor"])


def softmax_scale(shape: ModelShape) -> float:
    """Return what attention scores are multiplied by: 1/√d, and for latent attention YaRN's mscale_all_dim twice."""
    scale = shape.head_dim**-0.5
    scaling = shape.rope.scaling
    if shape.mla and scaling and scaling.get("mscale_all_dim"):
        scale *= _mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return scale
