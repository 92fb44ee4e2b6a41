"""What megatron-core calls the tensors of a checkpoint, and which part of each one rank's parameter is.

The names are those of its `sharded_state_dict` with `singleton_local_shards`: a tensor a layer and an expert, a norm
named after the linear layer that TransformerEngine fuses it with, gate (`_w`) and up (`_v`) of a feed-forward part
apart, vocabulary without padding. They follow from the family's table and a rank's coordinates alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from quintet.models.weight import Weight

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each dim of a full tensor."""
_BOXES = 1 << 16
"""Whose sizes are remembered: a model of experts has ten thousands of parts, and few boxes."""

FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1",
}
"""Norms of a layer, and the linear layer that TransformerEngine fuses each with where there is one of that name; its weight is then
the linear layer's `layer_norm_weight`."""


@dataclass(frozen=True)
class Block:
    """A stretch of one rank's parameter that is a box of one tensor of the checkpoint.

    key, shape: the tensor's name and full shape. box: the part of it. start: where the box begins in the flattened
    parameter; its elements follow one another there, in the box's order.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    start: int

    @property
    def stop(self) -> int:
        """The place where the box ends in the flattened parameter."""
        return self.start + volume(self.box)


class CheckpointMap:
    """The way from a family's table to the tensors of a checkpoint. weights: the table of one model."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        self.weights = {w.name: w for w in weights}

    def key(self, name: str) -> str:
        """Return the checkpoint's name of a weight; of gate and up together, without their endings.

        Raises KeyError for a name that is not in the table.
        """
        self.weights[name]
        found = re.fullmatch(r"(.*\blayers\.\d+\.(?:transformer_layer\.)?)(.*)", name)
        if not found:
            return name
        prefix, inner = found.groups()
        linear = FUSED_NORMS.get(inner)
        if linear is not None and f"{prefix}{linear}.weight" in self.weights:
            inner = f"{linear}.layer_norm_weight"
        return prefix + re.sub(r"^mlp\.experts\.(\d+)\.", r"mlp.experts.experts.\1.", inner)

    def blocks(
        self, name: str, *, tp: tuple[int, int] = (0, 1), etp: tuple[int, int] = (0, 1)
    ) -> list[Block]:
        """Return the blocks of a weight on a rank that holds it, in the order of its parameter. tp, etp: (rank, size).

        A rank with nothing but the vocabulary's padding has no blocks.
        """
        weight, key = self.weights[name], self.key(name)
        rank, parts = etp if weight.split.startswith("expert_") else tp
        split = weight.split.removeprefix("expert_")
        first = weight.shapes[0]
        if split == "vocab":
            rows = -(-first[0] // parts)
            own = (min(rank * rows, first[0]), min((rank + 1) * rows, first[0]))
            return [Block(key, first, (own, *whole_box(first[1:])), 0)] if own[0] < own[1] else []
        if split == "gate_up":
            box = equal_part(first, 0, rank, parts)
            return [Block(key + "_w", first, box, 0), Block(key + "_v", first, box, volume(box))]
        full = (sum(s[0] for s in weight.shapes), *first[1:])
        dim = {"replicated": None, "rows": 0, "rows_halves_swapped": 0, "qkv": 0, "columns": 1}[split]
        return [Block(key, full, equal_part(full, dim, rank, parts), 0)]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], Weight]]:
        """Yield every tensor of a checkpoint: key, full shape, and the weight it is or is a part of."""
        for name, weight in self.weights.items():
            for block in self.blocks(name):
                yield block.key, block.shape, weight


def stacked(block: Block, *, experts: int, layers: int | None) -> Block:
    """Return the same block where megatron-core stacks, as it does by default: gate over up in one tensor, all experts of a
    layer in one, and with `layers` given (the decoder's number of them) all layers in one as well.

    core stacks layers when all are of one kind and moe_layer_freq is a number; multi-token prediction never is. `box`
    and `shape` gain leading dims: [layers, experts, ...]. Vocabularies may have padding in `shape`.
    """
    half = re.fullmatch(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])", block.key)
    if half:
        rows = block.shape[0]
        first, last = (n + rows * (half[2] == "v") for n in block.box[0])
        block = replace(
            block, key=half[1], shape=(2 * rows, *block.shape[1:]), box=((first, last), *block.box[1:])
        )
    for pattern, count in (
        (r"(.*\.experts\.experts\.)(\d+)\.(.*)", experts),
        (r"(decoder\.layers\.)(\d+)\.(.*)", layers),
    ):
        found = re.fullmatch(pattern, block.key)
        if found and count is not None:
            at = int(found[2])
            block = replace(
                block, key=found[1] + found[3], shape=(count, *block.shape), box=((at, at + 1), *block.box)
            )
    return block


def flat_boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield elements start:stop of a flattened box, as boxes in its order: of a matrix at most three."""
    if start >= stop:
        return
    (first, _), inner = box[0], box[1:]
    row = volume(inner)
    if not inner:
        yield ((first + start, first + stop),)
        return
    head, tail = -(-start // row), stop // row
    if head > tail:  # within one row
        yield from _in_row(first + tail, inner, start - tail * row, stop - tail * row)
        return
    yield from _in_row(first + head - 1, inner, start - (head - 1) * row, row)
    if head < tail:
        yield ((first + head, first + tail), *inner)
    yield from _in_row(first + tail, inner, 0, stop - tail * row)


def _in_row(at: int, inner: Box, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(inner, start, stop):
        yield ((at, at + 1), *box)


@lru_cache(maxsize=_BOXES)
def meet(a: Box, b: Box) -> Box | None:
    """Return what two boxes of one tensor share; None for nothing."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two of the boxes that share elements, if any do."""
    if not boxes or not boxes[0]:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    # Along the dim with the most cuts few boxes are met at a time.
    dim = max(range(len(boxes[0])), key=lambda d: len({box[d][0] for box in boxes}))
    met: list[Box] = []
    for box in sorted(boxes, key=lambda one: one[dim]):
        met = [one for one in met if one[dim][1] > box[dim][0]]
        for one in met:
            if meet(one, box) is not None:
                return one, box
        met.append(box)
    return None


def split(box: Box, units: Sequence[int], limit: int) -> Iterator[Box]:
    """Split a box into boxes of at most `limit` elements, in its order.

    units: along each dim, cuts are at multiples of this; what cannot be cut any more may be larger than the limit.
    """
    if volume(box) <= limit:
        yield box
        return
    for dim, ((start, stop), unit) in enumerate(zip(box, units, strict=True)):
        if (start // unit + 1) * unit >= stop:
            continue
        step = max(limit * (stop - start) // volume(box) // unit, 1) * unit
        while start < stop:
            end = min(start // unit * unit + step, stop)
            yield from split((*box[:dim], (start, end), *box[dim + 1 :]), units, limit)
            start = end
        return
    yield box


@lru_cache(maxsize=_BOXES)
def volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(box_sizes(box))


def whole_box(shape: Iterable[int]) -> Box:
    """Return the box that is all of a tensor."""
    return tuple((0, n) for n in shape)


@lru_cache(maxsize=_BOXES)
def box_sizes(box: Box) -> tuple[int, ...]:
    """Return the shape of what is in a box."""
    return tuple(stop - start for start, stop in box)


def slices(box: Box, part: Box) -> tuple[slice, ...]:
    """Return where a part of a box is, in a tensor that holds the box."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, box, strict=True))


def equal_part(full: tuple[int, ...], dim: int | None, rank: int, parts: int) -> Box:
    """Return the box of the rank-th of equal parts of a tensor along one dim; for None, that of the whole."""
    box = list(whole_box(full))
    if dim is not None:
        step = full[dim] // parts
        box[dim] = (rank * step, (rank + 1) * step)
    return tuple(box)
