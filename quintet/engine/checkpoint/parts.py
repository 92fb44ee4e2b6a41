"""Which boxes of which tensors of a checkpoint one rank's model and optimizer are, and where they lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quintet.engine.checkpoint.slots import Slot
from quintet.engine.mesh import Mesh
from quintet.engine.weights.shards import EMBEDDING, held_tensors, stored_table
from quintet.models import ModelShape
from quintet.models.mcore import Block, Box, CheckpointMap, flat_boxes, volume

STATE_PREFIX = "optimizer.state."
PIECE_BYTES = 64 << 20
"""No written tensor is larger, but for a single row: what reading needs memory for at a time."""


@dataclass(frozen=True)
class Part:
    """A box of the tensor `key` of `shape`, and the live elements in it: a view [n], in the box's order.

    saved: whether it is this rank that writes it, of those that hold the same.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    flat: Tensor
    saved: bool

    def pieces(self) -> Iterator[Part]:
        """Yield the part in pieces of whole rows, of at most PIECE_BYTES where a row is not larger."""
        first, last = self.box[0]
        row = volume(self.box[1:])
        rows = max(PIECE_BYTES // (row * self.flat.element_size()), 1)
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            flat = self.flat[(start - first) * row : (stop - first) * row]
            yield replace(self, box=((start, stop), *self.box[1:]), flat=flat)


@dataclass(frozen=True)
class StatePart:
    """A box of the tensor `key`, and where a slot's tensors (master, moments) have its elements: from `start` on."""

    slot: Slot
    key: str
    shape: tuple[int, ...]
    box: Box
    start: int
    saved: bool

    def part(self, kind: str, tensor: Tensor) -> Part:
        """Return the box in one of the slot's tensors."""
        flat = tensor.detach().view(-1)[self.start : self.start + volume(self.box)]
        return Part(state_key(kind, self.key), self.shape, self.box, flat, self.saved)


def state_key(kind: str, key: str) -> str:
    """Return where the optimizer's state of a tensor is: `kind` is fp32_param, exp_avg, …"""
    return f"{STATE_PREFIX}{kind}.{key}"


class Holding:
    """What one rank holds of a model, as blocks of the checkpoint's tensors. Of a model with adapters: what is trained."""

    def __init__(self, chunks: Sequence[Any], shape: ModelShape, mesh: Mesh) -> None:
        self.mesh = mesh
        self.map = CheckpointMap(stored_table(chunks, shape).values())
        order = {name: i for i, name in enumerate(self.map.weights)}
        at, sizes = mesh.coordinates, mesh.sizes
        self._blocks: list[_Placed] = []
        for chunk in chunks:
            for name, parameter, start in held_tensors(chunk, mesh):
                if getattr(chunk, "adapters", None) is not None and name not in self.map.weights:
                    continue  # frozen
                copy = name == EMBEDDING and not mesh.first_stage  # is the first stage's to save
                split = self.map.weights[name].split
                for block in self.map.blocks(name, tp=(at["tp"], sizes.tp), etp=(at["etp"], sizes.etp)):
                    shifted = replace(block, start=block.start + start)
                    self._blocks.append(_Placed(parameter, shifted, order[name], split, copy))

    def weights(self) -> Iterator[Part]:
        """Yield every parameter, and the buffers that are stored with them."""
        for one in self._blocks:
            flat = one.tensor.detach().view(-1)[one.block.start : one.block.stop]
            saved = one.saved_by(self.mesh, sliced=False)
            yield Part(one.block.key, one.block.shape, one.block.box, flat, saved)

    def states(self, slots: Iterable[Slot], *, distributed: bool) -> Iterator[StatePart]:
        """Yield what each slot holds of the blocks. distributed: slots are slices that differ between data-parallel ranks."""
        by_parameter = {id(slot.parameter): slot for slot in slots}
        for one in self._blocks:
            slot = by_parameter.get(id(one.tensor))
            if slot is None:
                continue
            saved = one.saved_by(self.mesh, sliced=distributed)
            start, stop = max(slot.start, one.block.start), min(slot.stop, one.block.stop)
            for box in flat_boxes(one.block.box, start - one.block.start, stop - one.block.start):
                yield StatePart(slot, one.block.key, one.block.shape, box, start - slot.start, saved)
                start += volume(box)


@dataclass(frozen=True)
class _Placed:
    """A block in a live tensor. order: its place in the table. copy: of what another stage holds."""

    tensor: Tensor
    block: Block
    order: int
    split: str
    copy: bool

    def saved_by(self, mesh: Mesh, *, sliced: bool) -> bool:
        """Whether this rank saves it: those that hold the same take turns. sliced: data-parallel ranks hold slices."""
        expert = self.split.startswith("expert_")
        axes = [] if sliced else ["edp"] if expert else ["cp", "dp"]
        if self.split.endswith("replicated"):
            axes.append("etp" if expert else "tp")
        which, count = 0, 1
        for axis in axes:
            size = getattr(mesh.sizes, axis)
            which, count = which * size + mesh.at(axis), count * size
        return not self.copy and self.order % count == which
