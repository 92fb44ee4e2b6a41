"""Copies of many tensors at once, which are made again and again into memory that is elsewhere each time."""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from quintet.models.mcore import Box, box_sizes


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
        dims = zip(self.shape, self.strides, strides_of(self.shape), strict=True)
        return all(size == 1 or stride == own for size, stride, own in dims)

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
        begins = zip(box, whole, self.strides, strict=True)
        ahead = sum((start - first) * stride for (start, _), (first, _), stride in begins)
        return self._replace(shape=box_sizes(box), offset=self.offset + ahead)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    found = [1]
    for size in shape[:0:-1]:
        found.append(found[-1] * size)
    return tuple(reversed(found[: len(shape)]))


_Ends = tuple[list[Tensor | Place], list[Tensor | Place]]
"""Targets and sources."""


class Copies:
    """Copies that are made again and again: into the first of each pair the elements of the second, in their order; shapes may differ in
    how dims are split.

    What is contiguous on both sides goes together, in one launch for many: a model of experts has ten thousands.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor | Place, Tensor | Place]]) -> None:
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

    def run(self, *memory: Tensor) -> None:
        """Make them. memory: the bytes of which places are."""
        with torch.no_grad():
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
