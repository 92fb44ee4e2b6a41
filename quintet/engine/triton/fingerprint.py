"""The Triton kernel of fingerprints: many tensors in one launch, each element read once.

What it computes is defined in `quintet.engine.weights.fingerprint`. A tensor becomes one or more tables of a walk: two axes of at
most two dims each, in tiles. The weight of a place is the product of a hash of its row and one of its column, so a tile
hashes its columns once and each of its rows once; an element costs a load and a multiplication.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.engine.weights.fingerprint import BITS, COLUMNS, ROWS, SALTS, Dim, Walk
from quintet.engine.weights.hashing import FIRST, GOLDEN, SECOND

OUTER, INNER = 64, 1024
"""Rows and columns of a tile: one program. The inner axis is the one along which memory is read."""
WARPS = 2
VECTOR_BYTES = 16
"""What one thread loads at once, where everything is a multiple of it."""
_AXIS = 8  # numbers an axis: salt, first, and of two dims sizes, strides, steps
_FIELDS = 1 + 2 * _AXIS


@triton.jit
def _mix(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """See `quintet.engine.weights.hashing.mix`."""
    x = (x ^ _shift(x, 30)) * FIRST
    x = (x ^ _shift(x, 27)) * SECOND
    return x ^ _shift(x, 31)


@triton.jit
def _shift(x, BITS: tl.constexpr):
    return (x.to(tl.uint64) >> BITS).to(tl.int64)


@triton.jit
def _weight(axis, i, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The weight of step i (below 2³¹) along an axis, and how far it is in memory (elements)."""
    size = tl.load(axis + 3).to(tl.int32)
    outer, inner = (i // size).to(tl.int64), (i % size).to(tl.int64)
    number = tl.load(axis + 1) + outer * tl.load(axis + 6) + inner * tl.load(axis + 7)
    far = outer * tl.load(axis + 4) + inner * tl.load(axis + 5)
    return _mix(number * GOLDEN + tl.load(axis), FIRST, SECOND) | 1, far


@triton.jit
def _sum_kernel(
    tables,
    owners,
    begins,
    out,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TYPE: tl.constexpr,
    MASK: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIELDS: tl.constexpr,
    AXIS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
):
    """One program a tile. tables: [n, FIELDS]; owners: of each tile, its table; begins: of each table, its first tile.
    ALIGNED: elements per vector where the inner axis is dense, its length and all rows' places whole vectors; else 0."""
    tile = tl.program_id(0)
    owner = tl.load(owners + tile).to(tl.int64)
    table = tables + owner * FIELDS
    outer_axis, inner_axis = table + 1, table + 1 + AXIS
    rows = (tl.load(outer_axis + 2) * tl.load(outer_axis + 3)).to(tl.int32)
    columns = (tl.load(inner_axis + 2) * tl.load(inner_axis + 3)).to(tl.int32)
    number = tile - tl.load(begins + owner).to(tl.int32)
    across = (columns + INNER - 1) // INNER
    row, column = number // across * OUTER, number % across * INNER
    lane = column + tl.arange(0, INNER)
    weights, far = _weight(inner_axis, lane, GOLDEN, FIRST, SECOND)
    if ALIGNED:
        far = lane
        columns = tl.multiple_of(columns, ALIGNED)
    inside = lane < columns
    start = tl.load(table)
    total = tl.zeros([INNER], tl.int64)
    for i in range(row, tl.minimum(row + OUTER, rows)):
        weight, place = _weight(outer_axis, i, GOLDEN, FIRST, SECOND)
        at = (start + place * (TYPE.primitive_bitwidth // 8)).to(tl.pointer_type(TYPE))
        if ALIGNED:
            at = tl.multiple_of(at, 16)
        bits = tl.load(at + far, mask=inside, other=0).to(tl.int64)
        total += (bits & MASK) * weight
    tl.store(out + tile, tl.sum(total * weights, 0))


def sums(parts: list[tuple[Tensor, Walk]]) -> Tensor:
    """Return fingerprints of tensors on one GPU: int64 [n] there."""
    groups: dict[tuple[int, int], tuple[list[int], array[int]]] = {}
    for place, (tensor, walk) in enumerate(parts):
        start, size = tensor.data_ptr(), tensor.element_size()
        for offset, vectors, table in _tables(walk, VECTOR_BYTES // size):
            first = start + offset * size
            aligned = vectors if first % VECTOR_BYTES == 0 else 0
            places, tables = groups.setdefault((size, aligned), ([], array("q")))
            places.append(place)
            tables.append(first)
            tables.extend(table)
    out = torch.zeros(len(parts), dtype=torch.int64, device=parts[0][0].device)
    for (size, aligned), (places, numbers) in groups.items():
        tables_of_group = torch.frombuffer(numbers, dtype=torch.int64).view(-1, _FIELDS)
        _launch(out, torch.tensor(places), tables_of_group, BITS[size], aligned)
    return out


def _launch(out: Tensor, places: Tensor, tables: Tensor, dtype: torch.dtype, aligned: int) -> None:
    """Add the sum of each table [n, _FIELDS] to its place in `out`."""
    rows = tables[:, 3] * tables[:, 4]
    columns = tables[:, 3 + _AXIS] * tables[:, 4 + _AXIS]
    tiles = -(-rows // OUTER) * -(-columns // INNER)
    ends = tiles.cumsum(0)
    count = int(ends[-1])
    device = out.device
    numbers = torch.arange(len(tables), dtype=torch.int32, device=device)
    owners = numbers.repeat_interleave(tiles.to(device), output_size=count)
    partial = torch.empty(count, dtype=torch.int64, device=device)
    width = 8 * dtype.itemsize
    _sum_kernel[(count,)](
        tables.to(device),
        owners,
        (ends - tiles).to(device),
        partial,
        GOLDEN=GOLDEN,
        FIRST=FIRST,
        SECOND=SECOND,
        TYPE=_TYPES[dtype],
        MASK=-1 if width == 64 else (1 << width) - 1,
        ALIGNED=aligned,
        FIELDS=_FIELDS,
        AXIS=_AXIS,
        OUTER=OUTER,
        INNER=INNER,
        num_warps=WARPS,
    )
    out.index_add_(0, places.to(device)[owners], partial)


_TYPES = {torch.uint8: tl.uint8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}


@lru_cache(maxsize=4096)
def _tables(walk: Walk, vector: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """A walk as tables: (elements before it; `vector` where it is of whole vectors as far as sizes tell, else 0; salt, first
    number and two dims of the outer axis, the same of the inner)."""
    dims = walk.dims
    inner = min(dims, key=lambda dim: dim.stride).axis if dims else COLUMNS
    axes = (ROWS, COLUMNS) if inner == COLUMNS else (COLUMNS, ROWS)
    kept: dict[int, tuple[int, ...]] = {}
    other: list[Dim] = []
    for axis in axes:
        own = [dim for dim in dims if dim.axis == axis]
        largest = sorted(own, key=lambda dim: dim.size)[-2:]
        other += [dim for dim in own if dim not in largest]
        pair = [dim for dim in own if dim in largest]
        pair = [Dim(1, 0, 0, axis)] * (2 - len(pair)) + pair
        kept[axis] = tuple(getattr(dim, what) for what in ("size", "stride", "step") for dim in pair)
    tables = []
    for offset, first in _starts(walk, other):
        fields = tuple(x for axis in axes for x in (SALTS[axis], first[axis], *kept[axis]))
        tables.append((offset, vector if _whole_vectors(fields, vector) else 0, fields))
    return tuple(tables)


def _starts(walk: Walk, other: list[Dim]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Where tables begin: one for each step along the dims that do not fit into one."""
    for at in itertools.product(*(range(dim.size) for dim in other)):
        first = list(walk.first)
        for i, dim in zip(at, other, strict=True):
            first[dim.axis] += i * dim.step
        yield (
            walk.offset + sum(i * dim.stride for i, dim in zip(at, other, strict=True)),
            (first[0], first[1]),
        )


def _whole_vectors(table: tuple[int, ...], vector: int) -> bool:
    """Whether the inner axis is dense and every row of it begins and ends with a whole vector."""
    strides, (outer_size, size), (_, stride) = (
        table[4:6],
        table[_AXIS + 2 : _AXIS + 4],
        table[_AXIS + 4 : _AXIS + 6],
    )
    dense = outer_size == 1 and stride == 1
    return dense and math.gcd(size, *strides) % vector == 0
