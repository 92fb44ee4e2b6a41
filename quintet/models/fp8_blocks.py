"""Matrices in 8 bits, as Hugging Face directories of FP8 models hold them (DeepSeek-V3, https://arxiv.org/abs/2412.19437,
section 3.3.2): `X.weight` in float8_e4m3fn, and `X.weight_scale_inv` with a scale for each block of 128 × 128. A weight is its 8-bit
number times its block's scale; blocks at the lower and right edges may be smaller.
"""

from __future__ import annotations

BLOCK = 128
SCALE = "_scale_inv"
"""What the name of a matrix's scales ends in, after that of the matrix."""
DTYPE = "F8_E4M3"
"""What a safetensors file calls the type of the numbers."""


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix [rows, columns]."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)
