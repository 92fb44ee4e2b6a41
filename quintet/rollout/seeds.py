"""The seed of each sample: a hash of its request's seed and its number."""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN, MIX_A, MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64 (Steele, Lea, Flood 2014)."""


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * MIX_A & MASK
    x = (x ^ (x >> 27)) * MIX_B & MASK
    return x ^ (x >> 31)


def sample_seed(seed: int, number: int) -> int:
    """Seed of sample `number` of a request with this seed, within 0 … 2⁶³ - 1."""
    return _mix((seed * GOLDEN + _mix(number + 1)) & MASK) >> 1
