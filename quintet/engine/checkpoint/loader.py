"""Loading in any layout: everything is read and checked first, and only then does anything of the engine change.

A rank reads the chunks that its own boxes meet, one after another in the order of the files, and keeps its boxes on the
host until every rank has all of them. Host memory: what the rank holds, and for each of READERS threads two chunks: its
bytes, and the tensor made of them. Moments on the host take the place of what was read, parameter by parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.engine.checkpoint.parts import STATE_PREFIX, Holding, Part, StatePart, state_key
from quintet.engine.checkpoint.reader import Chunk, Reader, within
from quintet.engine.checkpoint.slots import MASTER, Slot
from quintet.errors import UserError
from quintet.models.mcore import Box, box_sizes
from quintet.models.weights_on_disk import listed

READERS = 4
"""Threads that read: one thread's checksums are slower than a fast disk. Each needs memory for two chunks."""


@dataclass
class _Wanted:
    """A box of a stored tensor, in the type of where it goes. place: that tensor [n], asked for when all is read; slot: whose state it is."""

    key: str
    box: Box
    dtype: torch.dtype
    place: Callable[[], Tensor]
    slot: Slot | None = None
    read: Tensor | None = None


class Load:
    """What one rank takes from a checkpoint: made, then `read`, and after all ranks agreed `commit`ted."""

    def __init__(self, reader: Reader, holding: Holding) -> None:
        self.reader = reader
        self._wanted: list[_Wanted] = []
        self._check_names(holding)

    def want_weights(self, holding: Holding, *, from_masters: bool) -> None:
        """Ask for all parameters and stored buffers. from_masters: fp32 parameters are read from fp32 masters, where stored."""
        for part in holding.weights():
            key = part.key
            master = state_key(MASTER, key)
            if from_masters and part.flat.dtype == torch.float32 and master in self.reader.tensors:
                key = master
            self._want(key, part, part.flat.dtype, _flat(part))

    def want_states(self, parts: Iterable[StatePart], moments: Sequence[str]) -> None:
        """Ask for masters and moments. Where a checkpoint has no masters, its weights are fp32 and are the masters."""
        for one in parts:
            if one.slot.master is not None:
                master = state_key(MASTER, one.key)
                key = master if master in self.reader.tensors else one.key
                self._want(key, one, torch.float32, _place(one, MASTER, ()))
            for name in moments:
                self._want(state_key(name, one.key), one, torch.float32, _place(one, name, moments))

    def read(self) -> None:
        """Read and check everything that is wanted.

        Raises UserError naming file and tensor for what is missing or damaged.
        """
        needed: dict[Chunk, list[tuple[_Wanted, Box]]] = defaultdict(list)
        for one in self._wanted:
            for chunk, part in self.reader.meeting(one.key, one.box):
                needed[chunk].append((one, part))
        for one in self._wanted:
            one.read = torch.empty(box_sizes(one.box), dtype=one.dtype)

        def take(chunk: Chunk) -> None:
            tensor = self.reader.read(chunk)
            for one, part in needed[chunk]:
                assert one.read is not None
                within(one.read, one.box, part).copy_(within(tensor, chunk.box, part))

        with ThreadPoolExecutor(READERS) as pool:
            # After a failure, none that has not begun.
            list(pool.map(take, sorted(needed, key=lambda c: (c.file, c.offset))))

    def commit(self, slots: Iterable[Slot], begin: Callable[[Slot], None]) -> None:
        """Copy it to where it belongs; the host memory is given back on the way. begin: makes the state of each of the slots, first what is
        copied there."""
        left = {id(slot): slot for slot in slots}
        with torch.no_grad():
            for one in self._wanted:
                if one.slot is not None and left.pop(id(one.slot), None) is not None:
                    begin(one.slot)
                assert one.read is not None
                one.place().copy_(one.read.view(-1))
                one.read = None
        for slot in left.values():
            begin(slot)

    def _want(
        self, key: str, where: Part | StatePart, dtype: torch.dtype, place: Callable[[], Tensor]
    ) -> None:
        stored = self.reader.tensors.get(key)
        if stored is None:
            raise UserError(f"{self.reader.path}: {key} is missing")
        if stored.shape != tuple(where.shape):
            raise UserError(
                f"{self.reader.path}: {key} has shape {stored.shape}, this model's has {tuple(where.shape)}"
            )
        slot = where.slot if isinstance(where, StatePart) else None
        self._wanted.append(_Wanted(key, where.box, dtype, place, slot))

    def _check_names(self, holding: Holding) -> None:
        """The checkpoint holds the tensors of this model, on whichever rank they are, and no others."""
        expected = {key for key, _, _ in holding.map.tensors()}
        found = set(self.reader.tensors)
        missing = sorted(expected - found)
        if missing:
            raise UserError(f"{self.reader.path} lacks tensors of this model: {listed(missing)}")
        left = sorted(
            key
            for key in found - expected
            if not (
                key.startswith(STATE_PREFIX) and key.removeprefix(STATE_PREFIX).partition(".")[2] in expected
            )
        )
        if left:
            raise UserError(f"{self.reader.path} holds tensors that this model does not have: {listed(left)}")


def _flat(part: Part) -> Callable[[], Tensor]:
    return lambda: part.flat


def _place(one: StatePart, kind: str, moments: Sequence[str]) -> Callable[[], Tensor]:
    return lambda: one.part(kind, one.slot.tensors(moments)[kind]).flat
