"""The Triton kernel of copies that are made again and again: ten thousands of parts in one launch, by a table that stays on the GPU.

A part becomes entries of rows and columns, counted in units of as many bytes as all of its places are multiples of. What an entry says of
memory is relative to where a storage or a stretch of memory begins, which may be elsewhere each time.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.engine.copies import Pair, Place
from quintet.engine.device import upload

SPAN, BLOCK = 4096, 1024
"""Units of a program, and of one step of it."""
MOST_ENTRIES = 64
"""Of a part: what has more rows of rows than that is no part of a table."""
_FIELDS = 8  # of target and source where memory begins and how far on (bytes); rows, columns; strides of rows (units)
_UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
MEMORIES = 3
"""Of stretches of memory, how many a table may be run with."""


@triton.jit
def _begin(entry, bases, first, second, third):
    """The address that an entry's target or source begins at: of a storage, or, counted down from -1, of a stretch of memory."""
    which = tl.load(entry)
    base = tl.load(bases + which, mask=which >= 0, other=0)
    base += (
        tl.where(which == -1, first, 0) + tl.where(which == -2, second, 0) + tl.where(which == -3, third, 0)
    )
    return base + tl.load(entry + 1)


@triton.jit
def _copy_kernel(
    entries,
    owners,
    begins,
    bases,
    first,
    second,
    third,
    UNIT: tl.constexpr,
    FIELDS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a span. entries: [n, FIELDS]; owners: of each span, its entry; begins: of each entry, its first span."""
    span = tl.program_id(0)
    owner = tl.load(owners + span).to(tl.int64)
    entry = entries + owner * FIELDS
    columns = tl.load(entry + 5).to(tl.int32)
    total = tl.load(entry + 4).to(tl.int32) * columns
    target = _begin(entry, bases, first, second, third).to(tl.pointer_type(UNIT))
    source = _begin(entry + 2, bases, first, second, third).to(tl.pointer_type(UNIT))
    target_stride, source_stride = tl.load(entry + 6), tl.load(entry + 7)
    begin = (span - tl.load(begins + owner).to(tl.int32)) * SPAN
    for at in range(0, SPAN, BLOCK):
        i = begin + at + tl.arange(0, BLOCK)
        row, column = (i // columns).to(tl.int64), i % columns
        found = tl.load(source + row * source_stride + column, mask=i < total)
        tl.store(target + row * target_stride + column, found, mask=i < total)


class CopyTable:
    """Pairs of target and source as tables on a GPU. `rest`: those that are none, of unlike types or of too many dims.

    memories: how many stretches of memory it is run with, MEMORIES at most.
    """

    def __init__(self, pairs: Sequence[Pair], memories: int, device: torch.device) -> None:
        assert memories <= MEMORIES
        self.rest: list[Pair] = []
        self._device, self._memories = device, memories
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        tables: dict[int, array[int]] = defaultdict(lambda: array("q"))
        for pair in pairs:
            entries = list(self._entries(*pair))
            if not entries:
                self.rest.append(pair)
            for unit, entry in entries:
                tables[unit].extend(entry)
        self._tables = [(_UNITS[unit], *self._spans(numbers)) for unit, numbers in tables.items()]
        self._known: list[int] = []
        self._bases = torch.zeros(1, dtype=torch.int64, device=device)

    def run(self, *memory: Tensor) -> None:
        """Make the copies. memory: see `Copies.run`."""
        where = [one.data_ptr() for _, one in self._storages.values()]
        if where != self._known:  # training state was away, and has come back to elsewhere
            self._bases, self._known = upload(torch.tensor(where, dtype=torch.int64), self._device), where
        given = [one.data_ptr() for one in memory]
        # Filled up with an address: for 0, a number of 32 bits, the kernel would be compiled anew.
        given += given[:1] * (MEMORIES - len(given))
        for unit, entries, owners, begins in self._tables:
            _copy_kernel[(len(owners),)](
                entries,
                owners,
                begins,
                self._bases,
                *given,
                UNIT=unit,
                FIELDS=_FIELDS,
                SPAN=SPAN,
                BLOCK=BLOCK,
            )

    def _entries(self, target: Tensor | Place, source: Tensor | Place) -> Iterator[tuple[int, list[int]]]:
        """The entries of a pair of one shape, each with its unit; none where it is to be copied otherwise."""
        size = target.dtype.itemsize
        dims = _merged(target.shape, target.stride(), source.stride())
        *outer, rows, (columns, _, _) = [(1, 0, 0), *dims]
        fits = math.prod(target.shape) * size < 1 << 31 and math.prod(n for n, *_ in outer) <= MOST_ENTRIES
        if target.dtype != source.dtype or not fits:
            return
        at = [self._begin(one) for one in (target, source)]
        for steps in itertools.product(*(range(n) for n, *_ in outer)):
            (to, here), (of, there) = (
                (base, size * (begin + sum(i * one[side] for i, one in zip(steps, outer, strict=True))))
                for side, (base, begin) in enumerate(at, start=1)
            )
            unit = math.gcd(8, here, there, columns * size, rows[1] * size, rows[2] * size)
            in_units = (n * size // unit for n in (columns, rows[1], rows[2]))
            yield unit, [to, here, of, there, rows[0], *in_units]

    def _begin(self, one: Tensor | Place) -> tuple[int, int]:
        """Where memory begins, as the kernel counts it, and how far on a part does (elements)."""
        if isinstance(one, Place):
            return -1 - one.memory % self._memories, one.offset
        storage = one.untyped_storage()
        number, _ = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
        return number, int(one.storage_offset())

    def _spans(self, numbers: array[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Entries, owners and begins of a table, as the kernel takes them."""
        entries = torch.frombuffer(numbers, dtype=torch.int64).view(-1, _FIELDS)
        spans = -(-entries[:, 4] * entries[:, 5] // SPAN)
        owners = torch.arange(len(entries), dtype=torch.int32).repeat_interleave(spans)
        return (
            entries.to(self._device),
            owners.to(self._device),
            (spans.cumsum(0) - spans).to(torch.int32).to(self._device),
        )


def _merged(shape: Sequence[int], target: Sequence[int], source: Sequence[int]) -> list[tuple[int, int, int]]:
    """Size and both strides of each dim, those together that are one on both sides; the last is dense on both."""
    found: list[tuple[int, int, int]] = []
    for size, here, there in zip(shape, target, source, strict=True):
        if size == 1:
            continue
        if found and found[-1][1:] == (size * here, size * there):
            size *= found.pop()[0]
        found.append((size, here, there))
    return found if found and found[-1][1:] == (1, 1) else [*found, (1, 1, 1)]
