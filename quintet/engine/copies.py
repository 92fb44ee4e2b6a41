"""Copies of many tensors at once, which are made again and again into memory that is elsewhere each time."""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quintet.engine.device import runs_fused
from quintet.models.mcore import Box, box_sizes

if TYPE_CHECKING:
    from quintet.engine.triton.copies import CopyTable


class Place(NamedTuple):
    """A view of memory that is not there yet, in what `Copies` needs of a tensor. memory: which of the stretches of bytes that they are run
    with. strides and offset: in elements."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def is_contiguous(self) -> bool:
        dense = 1
        for size, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if size != 1:
                if stride != dense:
                    return False
                dense *= size
        return True

    def view(self, shape: Sequence[int]) -> Place:
        """Return it with each dim split into one or more, or, where it is contiguous, in any shape of as many elements."""
        if self.is_contiguous():
            return self._replace(shape=tuple(shape), strides=strides_of(shape))
        strides, dims = list[int](), [one for one in zip(self.shape, self.strides, strict=True) if one[0] > 1]
        for size in reversed(shape):
            whole, stride = dims.pop() if size > 1 else (1, 1)
            strides.append(stride)
            if size != whole:
                dims.append((whole // size, stride * size))
        return self._replace(shape=tuple(shape), strides=tuple(reversed(strides)))

    def part(self, whole: Box, box: Box) -> Place:
        """Return the part that is in a box, of what is all of a box."""
        if box == whole:
            return self
        begins = zip(box, whole, self.strides, strict=True)
        ahead = sum((start - first) * stride for (start, _), (first, _), stride in begins)
        return self._replace(shape=box_sizes(box), offset=self.offset + ahead)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    found = [1]
    for size in shape[:0:-1]:
        found.append(found[-1] * size)
    return tuple(reversed(found[: len(shape)]))


Pair = tuple[Tensor | Place, Tensor | Place]
"""A target and its source."""
_Ends = tuple[list[Tensor | Place], list[Tensor | Place]]
"""Targets and sources."""


class Copies:
    """Copies that are made again and again: into the first of each pair the elements of the second, in their order; shapes may differ in
    how dims are split.

    A model of experts has ten thousands. From the second time on a GPU makes them in one launch (`CopyTable`).
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._listed = _Listed(pairs)
        self._table: CopyTable | None = None
        self._ran = False

    def run(self, *memory: Tensor) -> None:
        """Make them. memory: the bytes of which places are, as many stretches each time."""
        with torch.no_grad():
            if self._ran and self._table is None and memory and runs_fused(memory[0]):
                from quintet.engine.triton.copies import CopyTable

                self._table = CopyTable(self._listed.pairs(), len(memory), memory[0].device)
                self._listed = _Listed(self._table.rest)
            self._ran = True
            if self._table is not None:
                self._table.run(*memory)
            self._listed.run(*memory)


class _Listed:
    """Copies that go one by one, or, where both sides are contiguous, as lists that torch takes at once."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._alone: _Ends = [], []
        self._together: dict[tuple[torch.dtype, torch.dtype], _Ends] = defaultdict(lambda: ([], []))
        for target, source in pairs:
            contiguous = target.is_contiguous() and source.is_contiguous()
            targets, sources = self._together[target.dtype, source.dtype] if contiguous else self._alone
            if target.shape != source.shape or (contiguous and target.stride() != source.stride()):
                finer = max(target.shape, source.shape, key=len)
                shape = (math.prod(finer),) if contiguous else finer
                target, source = target.view(shape), source.view(shape)
            targets.append(target)
            sources.append(source)

    def pairs(self) -> list[Pair]:
        """Return all of them, both sides in one shape."""
        return [pair for ends in (self._alone, *self._together.values()) for pair in zip(*ends, strict=True)]

    def run(self, *memory: Tensor) -> None:
        for target, source in zip(*(views(ends, *memory) for ends in self._alone), strict=True):
            target.copy_(source)
        for targets, sources in self._together.values():
            torch._foreach_copy_(views(targets, *memory), views(sources, *memory))


def views(ends: Iterable[Tensor | Place], *memory: Tensor) -> list[Tensor]:
    """Return tensors as they are, and of places the views of the memory that is given."""
    typed: dict[tuple[int, torch.dtype], Tensor] = {}
    found = []
    for one in ends:
        if isinstance(one, Tensor):
            found.append(one)
            continue
        flat = typed.get(one[:2])
        if flat is None:
            flat = typed[one[:2]] = memory[one.memory].view(one.dtype)
        # One call, not three: there may be ten thousands.
        found.append(flat.as_strided(*one[2:]))
    return found


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Make copies once: see `Copies`."""
    Copies(pairs).run()


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python's collector from looking at ten thousands of parts again and again while there come to be more: half of a plan's time, and
    more than a whole sync where it looks at all that a process has."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
