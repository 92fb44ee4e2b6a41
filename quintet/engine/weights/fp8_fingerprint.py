"""Fingerprints of what a rollout with matrices in 8 bits is brought, straight from the ranks' shards, whatever the layout.

A block's scale follows from its largest element, which may be on another rank: blocks lie across the cuts of a layout. So the
largest of every block is agreed on first, in one collective; then each rank quantizes the part that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from quintet.engine.weights import fp8
from quintet.engine.weights.fingerprint import Fingerprints, fingerprints
from quintet.engine.weights.shards import Shard
from quintet.models import ModelShape, table_of
from quintet.models.mcore import Box, whole_box

ROWS = 1024
"""Of a matrix, quantized at a time."""
Item = tuple[str, tuple[int, ...], Box, Tensor]


@torch.no_grad()
def quantized_fingerprints(
    shards: Sequence[Shard], shape: ModelShape, device: torch.device
) -> tuple[Fingerprints, dict[str, tuple[int, ...]]]:
    """Return fingerprints of this rank's shards as they are brought, and the whole shapes of those tensors; scales are told by
    every rank that holds some of their matrix. Collective over the default group."""
    largest = _Largest(shape, device)
    for shard in shards:
        if shard.name in largest.shapes:
            largest.see(shard)
    largest.agree()
    shapes = {shard.name: shard.shape for shard in shards}
    shapes |= {
        name + fp8.SCALE: fp8.scales_shape(full) for name, full in largest.shapes.items() if name in shapes
    }
    return fingerprints(_brought(shards, largest)), shapes


def _brought(shards: Sequence[Shard], largest: _Largest) -> Iterator[Item]:
    for shard in shards:
        if shard.name not in largest.shapes:
            yield shard.name, shard.shape, shard.box, shard.view
            continue
        scales = largest.scales(shard.name)
        yield shard.name, shard.shape, shard.box, _quantized(shard, scales)
        whole = whole_box(scales.shape)
        yield shard.name + fp8.SCALE, tuple(scales.shape), whole, scales


class _Largest:
    """The largest magnitude in each block of all matrices that are quantized, fp32."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        names = fp8.quantized_names(shape)
        table = table_of(shape)
        self.shapes = {name: full for one in table for name, full in one.tensors if name in names}
        sizes = [math.prod(fp8.scales_shape(full)) for full in self.shapes.values()]
        self._flat = torch.zeros(sum(sizes), device=device)
        self._of = {
            name: part.view(fp8.scales_shape(full))
            for (name, full), part in zip(self.shapes.items(), self._flat.split(sizes), strict=True)
        }

    def see(self, shard: Shard) -> None:
        """Count what this rank holds."""
        piece, (top, left) = shard.read(), (start % fp8.BLOCK for start, _ in shard.box)
        if not piece.numel():
            return
        bottom, right = (-stop % fp8.BLOCK for _, stop in shard.box)
        padded = F.pad(piece.abs(), (left, right, top, bottom)).float()
        blocks = padded.unflatten(1, (-1, fp8.BLOCK)).unflatten(0, (-1, fp8.BLOCK)).amax((1, 3))
        held = self._of[shard.name][
            tuple(slice(start // fp8.BLOCK, -(-stop // fp8.BLOCK)) for start, stop in shard.box)
        ]
        torch.maximum(held, blocks, out=held)

    def agree(self) -> None:
        """Over all ranks. Collective."""
        dist.all_reduce(self._flat, op=dist.ReduceOp.MAX)

    def scales(self, name: str) -> Tensor:
        """Of a matrix: see `fp8.quantize`."""
        return fp8.scale_of(self._of[name])


def _quantized(shard: Shard, scales: Tensor) -> Tensor:
    """The shard's part in 8 bits, rows by rows."""
    piece, ((top, bottom), (left, right)) = shard.read(), shard.box
    columns = torch.arange(left, right, device=piece.device) // fp8.BLOCK
    out = torch.empty_like(piece, dtype=fp8.DTYPE)
    for start in range(top, bottom, ROWS):
        stop = min(start + ROWS, bottom)
        rows = torch.arange(start, stop, device=piece.device) // fp8.BLOCK
        scale = scales.index_select(0, rows).index_select(1, columns)
        out[start - top : stop - top] = fp8.rounded(piece[start - top : stop - top].float(), scale)
    return out
