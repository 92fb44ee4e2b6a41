"""Buckets: tensors laid one behind another in one stretch of memory, cut from a list of what a receiver is to get.

Planning alone: no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from quintet.engine.copies import Place, strides_of, views
from quintet.models.mcore import Box, box_sizes, split, volume
from quintet.typed import Dtype

ALIGNMENT = 256
"""Bytes; every entry begins at a multiple."""


@dataclass(frozen=True)
class Entry:
    """A part of a tensor in a bucket: `box` of the tensor `name`, whose full shape is `shape`, in a bucket from byte `offset` on."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: Dtype
    offset: int = 0

    @cached_property
    def nbytes(self) -> int:
        return volume(self.box) * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Entries that travel together, and how many bytes they take."""

    entries: tuple[Entry, ...]
    nbytes: int

    @cached_property
    def places(self) -> list[Place]:
        """The place of each entry in a stretch of bytes, in the shape of its box."""
        shapes = [box_sizes(one.box) for one in self.entries]
        return [
            Place(0, one.dtype, shape, strides_of(shape), one.offset // one.dtype.itemsize)
            for one, shape in zip(self.entries, shapes, strict=True)
        ]

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return a view of each entry, in the shape of its box. memory: bytes, a multiple of ALIGNMENT, from the bucket's first
        on."""
        return views(self.places, memory)


def in_buckets(
    wanted: Iterable[Entry], bucket_bytes: int, units: Mapping[str, tuple[int, ...]] | None = None
) -> list[Bucket]:
    """Return everything wanted, once and in order, in buckets of at most `bucket_bytes`.

    units: None keeps each entry whole. Otherwise one that is larger than a bucket is cut into boxes, at multiples of its
    units where it has any (`quintet.engine.weights.reshard.Holdings`). What cannot be cut has a bucket of its own, as large as it is.
    """
    groups: list[list[Entry]] = []
    end = 0
    for whole in wanted:
        for one in _pieces(whole, bucket_bytes, units):
            if not groups or aligned(end) + one.nbytes > bucket_bytes:
                groups.append([])
                end = 0
            groups[-1].append(one)
            end = aligned(end) + one.nbytes
    return [laid_out(entries) for entries in groups]


def _pieces(whole: Entry, bucket_bytes: int, units: Mapping[str, tuple[int, ...]] | None) -> Iterator[Entry]:
    if whole.nbytes:  # a rank with nothing but the vocabulary's padding wants none of it
        cuts = None if units is None else units.get(whole.name, (1,) * len(whole.box))
        boxes = [whole.box] if cuts is None else split(whole.box, cuts, bucket_bytes // whole.dtype.itemsize)
        yield from (whole if box == whole.box else replace(whole, box=box) for box in boxes)


def laid_out(entries: Iterable[Entry]) -> Bucket:
    """Return a bucket of these entries, one behind another."""
    placed, end = [], 0
    for one in entries:
        placed.append(Entry(one.name, one.shape, one.box, one.dtype, aligned(end)))
        end = aligned(end) + one.nbytes
    return Bucket(tuple(placed), end)


def aligned(nbytes: int) -> int:
    """Return so many bytes, up to the next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slots(sizes: Sequence[int], bucket_bytes: int) -> tuple[list[int], tuple[int, int]]:
    """Return which of the two stretches of memory each bucket of a sequence is in, and how large the two must be.

    They take turns, so that one is packed while another is read; but what is larger than a bucket is always in the first:
    memory then holds one large bucket and one of the usual size, never two large ones.
    """
    found: list[int] = []
    room = [ALIGNMENT, ALIGNMENT]
    for size in sizes:
        slot = 0 if size > bucket_bytes or not found else 1 - found[-1]
        found.append(slot)
        room[slot] = max(room[slot], aligned(size))
    return found, (room[0], room[1])
