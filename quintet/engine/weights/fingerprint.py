"""Fingerprints of weights, which add up over any cutting of a tensor.

Seen as a matrix (its last dim is the columns, all others together the rows), a tensor X has the fingerprint

    Σ over row r, column c of   a(r) · b(c) · bits(X[r, c])      in wrapping 64-bit arithmetic,

where bits is an element's bit pattern as an unsigned number and a, b are odd hashes of r and c. The fingerprint of a part
sums over its elements alone, with their places in the full tensor: disjoint parts add up to the whole, however two layouts
cut it. The weights a(r) · b(c) are odd, so a change of one element is always found; other mistakes (elements, rows
or experts swapped, a transpose, a shift) are missed with the probability of a 64-bit hash. -0.0 and NaN are just bits.

On CUDA one Triton kernel reads many tensors as they lie (`quintet.engine.triton.fingerprint`); elsewhere torch does, in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from quintet.engine.device import runs_fused
from quintet.engine.weights.hashing import GOLDEN, mix
from quintet.errors import SyncMismatch
from quintet.models.mcore import Box, volume

Fingerprints = dict[tuple[str, Box], int]
"""Of parts of tensors, by the tensor's name and the part's box."""

ROWS, COLUMNS = 0, 1
SALTS = (0x243F6A8885A308D3, 0x13198A2E03707344)
"""What tells the hash of row n from that of column n: without it, a transpose would not be seen (digits of π)."""
CHUNK = 1 << 18
"""Most elements that torch takes at once; each becomes a few 64-bit numbers."""
KEPT = 4096
"""Most numbers whose hashes are kept for the next tensor, 32 KiB."""
BATCH_BYTES = 1 << 30
"""Most bytes of tensors that wait for one launch: they may be temporary."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What an element's bit pattern is read as, by its bytes."""


@dataclass(frozen=True)
class Dim:
    """One dim of a walk through memory: `size` steps of `stride` elements; each is `step` rows (or columns) of the tensor."""

    size: int
    stride: int
    step: int
    axis: int


@dataclass(frozen=True, eq=False)  # looked up by identity: most tensors share theirs
class Walk:
    """The elements of a part: the first at `offset` (elements), row and column `first`; the others along `dims`."""

    offset: int
    first: tuple[int, int]
    dims: tuple[Dim, ...]

    def halves(self) -> tuple[Walk, Walk]:
        """Return the two halves of the walk, cut along the longest dim."""
        at = max(range(len(self.dims)), key=lambda i: self.dims[i].size)
        dim, half = self.dims[at], self.dims[at].size // 2
        first = list(self.first)
        first[dim.axis] += half * dim.step
        parts = [
            (*self.dims[:at], replace(dim, size=size), *self.dims[at + 1 :])
            for size in (half, dim.size - half)
        ]
        moved = Walk(self.offset + half * dim.stride, (first[0], first[1]), parts[1])
        return replace(self, dims=parts[0]), moved


def fingerprint(tensor: Tensor, shape: tuple[int, ...], box: Box) -> Tensor:
    """Return the fingerprint of one part: int64 scalar on the tensor's device.

    tensor: the elements of `box` in its order, with any strides and, where the shard map interleaves, more dims than the
    box. shape: of the full tensor. Raises ValueError for a tensor that cannot be the box's.
    """
    if runs_fused(tensor):
        return _fused([(tensor, walk_of(shape, box, tensor))])[0]
    return _plain(tensor, walk_of(shape, box, tensor))


def fingerprints(items: Iterable[tuple[str, tuple[int, ...], Box, Tensor]]) -> Fingerprints:
    """Return fingerprints of many parts, (name, shape, box, tensor) each as in `fingerprint`; the device is waited for once, at
    the end.

    Empty parts are left out. A part that comes twice must be the same: SyncMismatch names it otherwise.
    """
    sums: list[tuple[Sequence[tuple[str, Box]], Tensor]] = []
    waiting: list[tuple[tuple[str, Box], tuple[Tensor, Walk]]] = []
    room = BATCH_BYTES

    def launch() -> None:
        if waiting:
            keys, given = zip(*waiting, strict=True)
            sums.append((keys, _fused(list(given))))
            waiting.clear()

    for name, shape, box, tensor in items:
        walk = walk_of(shape, box, tensor)
        if not tensor.numel():
            continue
        if runs_fused(tensor):
            waiting.append(((name, box), (tensor, walk)))
            room -= tensor.nbytes
        else:
            sums.append(([(name, box)], _plain(tensor, walk)[None]))
        if room < 0:
            launch()
            room = BATCH_BYTES
    launch()
    parts: Fingerprints = {}
    for keys, values in sums:
        for key, value in zip(keys, values.tolist(), strict=True):
            if parts.setdefault(key, value) != value:
                raise SyncMismatch(f"{key[0]}: two copies of its part {list(key[1])} on one rank differ")
    return parts


def walk_of(shape: tuple[int, ...], box: Box, tensor: Tensor) -> Walk:
    """Return how a tensor that holds a box of a full tensor is walked through. Raises ValueError when it cannot hold it."""
    return _walk(tuple(shape), box, tuple(tensor.shape), tensor.stride())


@lru_cache(maxsize=4096)  # most tensors of a model have the shape of many others
def _walk(shape: tuple[int, ...], box: Box, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Walk:
    if len(shape) != len(box) or math.prod(sizes) != volume(box):
        raise ValueError(f"a tensor of {list(sizes)} cannot hold {list(box)} of one of {list(shape)}")
    left = [pair for pair in zip(sizes, strides, strict=True) if pair[0] > 1]
    dims: list[Dim] = []
    first = [0, 0]
    unit = 1  # rows a step along the box's dim is; columns in the last
    for at in reversed(range(len(shape))):
        axis = COLUMNS if at == len(shape) - 1 else ROWS
        (start, stop), held = box[at], 1
        first[axis] += start * unit
        while left and held < stop - start:
            size, stride = left.pop()
            dims.append(Dim(size, stride, held * unit, axis))
            held *= size
        if held != max(stop - start, 1):
            raise ValueError(f"dims of {list(sizes)} lie across those of {list(box)}")
        unit = unit * shape[at] if axis == ROWS else 1
    return Walk(0, (first[0], first[1]), tuple(_merged(dims[::-1])))


def _merged(dims: list[Dim]) -> Iterator[Dim]:
    """Dims, outermost first, with those joined that are one in memory and in the tensor."""
    for i, dim in enumerate(dims):
        inner = dims[i + 1] if i + 1 < len(dims) else None
        if inner is not None and dim.axis == inner.axis:
            steps = (inner.size * inner.stride, inner.size * inner.step)
            if (dim.stride, dim.step) == steps:
                dims[i + 1] = replace(inner, size=dim.size * inner.size)
                continue
        yield dim


def _fused(parts: list[tuple[Tensor, Walk]]) -> Tensor:
    """Of tensors on one GPU: int64 [n] there."""
    from quintet.engine.triton.fingerprint import sums

    return sums(parts)


def _plain(tensor: Tensor, walk: Walk) -> Tensor:
    values = tensor.detach().view(BITS[tensor.element_size()])  # of 16 and 32 bits with a sign
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    waiting = [walk] if tensor.numel() else []
    while waiting:
        walk = waiting.pop()
        if math.prod(dim.size for dim in walk.dims) > CHUNK:
            waiting += walk.halves()
        else:
            total += _piece(values, walk)
    return total


def _piece(values: Tensor, walk: Walk) -> Tensor:
    """Of a walk short enough to be widened to 64 bits at once."""
    sizes, strides = [dim.size for dim in walk.dims], [dim.stride for dim in walk.dims]
    piece = values.as_strided(sizes, strides, values.storage_offset() + walk.offset).to(torch.int64)
    width = 8 * values.element_size()
    if width in (16, 32):
        piece &= (1 << width) - 1
    over = [i for i, dim in enumerate(walk.dims) if dim.axis == COLUMNS]
    if over:
        piece = (piece * _weights(walk, COLUMNS, values.device)).sum(over, keepdim=True)
    else:
        piece = piece * _weights(walk, COLUMNS, values.device)
    return (piece * _weights(walk, ROWS, values.device)).sum()


def _weights(walk: Walk, axis: int, device: torch.device) -> Tensor:
    """a(r) of the walk's rows, or b(c) of its columns, int64 with the walk's dims (1 along the other axis')."""
    steps = tuple((dim.size, dim.step) if dim.axis == axis else (1, 0) for dim in walk.dims)
    if math.prod(size for size, _ in steps) > KEPT:
        return _hashes(walk.first[axis], steps, axis, device)
    return _kept_hashes(walk.first[axis], steps, axis, device)


def _hashes(first: int, steps: tuple[tuple[int, int], ...], axis: int, device: torch.device) -> Tensor:
    numbers = torch.full([1] * len(steps), first, device=device)
    for i, (size, step) in enumerate(steps):
        if size > 1:
            along = torch.arange(size, device=device) * step
            numbers = numbers + along.view(-1, *[1] * (len(steps) - 1 - i))
    return mix(numbers * GOLDEN + SALTS[axis]) | 1


_kept_hashes = lru_cache(maxsize=1024)(_hashes)  # the same sizes come again and again
