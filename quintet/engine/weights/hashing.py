"""SplitMix64's finaliser (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195): a well-spread 64-bit hash
of each number, in wrapping int64 arithmetic."""

from __future__ import annotations

from torch import Tensor

GOLDEN = -0x61C8864680B583EB
FIRST = -0x40A7B892E31B1A47
SECOND = -0x6B2FB644ECCEEE15
"""The constants as signed 64-bit numbers; multiples of GOLDEN are what is hashed of consecutive numbers."""


def mix(x: Tensor) -> Tensor:
    """Return the hash of each number of an int64 tensor."""
    x = (x ^ shift(x, 30)) * FIRST
    x = (x ^ shift(x, 27)) * SECOND
    return x ^ shift(x, 31)


def shift(x: Tensor, bits: int) -> Tensor:
    """Return logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
