"""Matrices in 8 bits: between them and other types (`quintet.models.fp8_blocks` says what they are).

Scales are powers of two, by the rule that TransformerEngine's Float8BlockScaling has unless told otherwise: weights that are
multiplied in 8 bits there and those that a rollout is sent are the same bytes. Dividing by such a scale rounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quintet.models import ModelShape, table_of
from quintet.models.fp8_blocks import BLOCK as BLOCK
from quintet.models.fp8_blocks import SCALE as SCALE
from quintet.models.fp8_blocks import scales_shape as scales_shape
from quintet.models.lora import linears

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
EXPONENT = 0x7F800000
"""The bits of an fp32 number's exponent: a positive one with these alone is the largest power of two within it."""
CHUNK_BLOCKS = 1024
"""Blocks that are worked on at a time, in fp32: 64 MiB."""


def quantized_names(shape: ModelShape) -> set[str]:
    """Return the tensors of a model that are quantized: the linear layers of attention, feed-forward parts and experts."""
    return {f"{part.name}.weight" for linear in linears(table_of(shape)) for part in linear.parts}


@torch.no_grad()
def quantize(matrix: Tensor, quantized: Tensor, scales: Tensor) -> None:
    """Write a matrix [rows, columns] into `quantized`, float8 of the same shape, and `scales`, fp32 (`scales_shape`)."""
    for rows, of_blocks in _chunks(matrix):
        blocks = _in_blocks(matrix[rows])
        scale = scale_of(blocks.abs().amax((1, 3)))
        scales[of_blocks] = scale
        height, width = matrix[rows].shape
        quantized[rows] = rounded(blocks, scale[:, None, :, None]).flatten(2).flatten(0, 1)[:height, :width]


def scale_of(largest: Tensor) -> Tensor:
    """Return the scales of blocks of these largest magnitudes, fp32: 1 / s, s being the largest power of two within 448 / largest.

    448 / largest is rounded to fp32 first. A block of zeros, or with what is no finite number, has 1.
    """
    ratio = (LARGEST / largest.float()).clamp_max(torch.finfo(torch.float32).max)
    power = (ratio.view(torch.int32) & EXPONENT).view(torch.float32)
    return torch.where((largest > 0) & (largest < torch.inf), 1 / power, 1.0)


def rounded(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return fp32 numbers, which are overwritten, in 8 bits, given each one's scale."""
    # Rounding of the ratio may put the largest a little beyond the type's range, where it would be NaN.
    return numbers.div_(scale).clamp_(-LARGEST, LARGEST).to(DTYPE)


def dequantize(quantized: Tensor, scales: Tensor, first: tuple[int, int] = (0, 0)) -> Tensor:
    """Return in fp32 a matrix or a part of one that begins at row and column `first` of what the scales are of."""
    rows, columns = (
        torch.arange(start, start + size, device=scales.device) // BLOCK
        for start, size in zip(first, quantized.shape, strict=True)
    )
    return quantized.float().mul_(scales[rows][:, columns])


def _chunks(matrix: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows that are whole rows of blocks, and those rows of blocks."""
    down, across = scales_shape(tuple(matrix.shape))
    step = max(CHUNK_BLOCKS // across, 1)
    for start in range(0, down, step):
        stop = min(start + step, down)
        yield slice(start * BLOCK, stop * BLOCK), slice(start, stop)


def _in_blocks(rows: Tensor) -> Tensor:
    """[blocks down, 128, blocks across, 128] in fp32, zeros beyond the edges."""
    down, across = scales_shape(tuple(rows.shape))
    padded = rows.new_zeros((down * BLOCK, across * BLOCK), dtype=torch.float32)
    padded[: rows.shape[0], : rows.shape[1]] = rows
    return padded.view(down, BLOCK, across, BLOCK)
