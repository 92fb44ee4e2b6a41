"""The shard map: which part of which Hugging Face tensor this rank holds, and where.

It is the one description of weights. Loading, exporting, resharding into another layout and fingerprints all
read it. A piece is a box of the full tensor (a start and a stop along each dim) and a view of the parameter that
holds it, so writing through the view changes the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from quintet.engine.mesh import Mesh, alone
from quintet.engine.weights.fingerprint import Fingerprints, fingerprints
from quintet.models import Family, ModelShape, Weight, table_of
from quintet.models.family import family_named
from quintet.models.lora import LoraShape, adapter_weights, is_adapter
from quintet.models.mcore import FUSED_NORMS, box_sizes, equal_part, whole_box
from quintet.models.mcore import Box as Box
from quintet.models.weight import Stack

EMBEDDING = "embedding.word_embeddings.weight"


@dataclass
class Shard:
    """One rank's piece of one Hugging Face tensor.

    name: the Hugging Face name. shape: of the full tensor. box: the part held here. view: of the live parameter;
    it has the box's elements in the box's order but may have more dims (interleaved q, k and v; gate and up). trained: whether it
    is a parameter; a buffer stays in fp32.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    view: Tensor
    trained: bool = True

    standing: ClassVar[bool] = True
    """Whether the view is the same memory each time; what is not is computed when it is read."""

    @property
    def behind(self) -> tuple[Tensor, ...]:
        """The tensors that the piece is read from."""
        return (self.view,)

    @property
    def box_shape(self) -> tuple[int, ...]:
        return box_sizes(self.box)

    @property
    def _dims(self) -> list[int]:
        """How many dims of the view each dim of the box is."""
        counts, at = [], 0
        for size in self.box_shape:
            begin, held = at, 1
            while at == begin or held != size:
                held *= self.view.shape[at]
                at += 1
            counts.append(at - begin)
        counts[-1] += self.view.dim() - at
        return counts

    def unit(self, dim: int = 0) -> int:
        """Return how much of the full tensor's dim is one step of the view: a part has whole units of it, or is within one."""
        first = sum(self._dims[:dim])
        return math.prod(self.view.shape[first + 1 : first + self._dims[dim]])

    def part(self, box: Box) -> Tensor:
        """Return the view of a box (in the full tensor's coordinates) that lies within this shard's.

        Raises ValueError when the box is neither whole interleaved groups nor within one.
        """
        view, at = self.view, 0
        for dim, ((start, stop), held, dims) in enumerate(zip(box, self.box, self._dims, strict=True)):
            if (start, stop) != held:
                try:
                    view = _narrowed(view, range(at, at + dims), start - held[0], stop - held[0])
                except ValueError as cut:
                    raise ValueError(f"{self.name}: {start}:{stop} of dim {dim} {cut}") from None
            at += dims
        return view

    def read(self) -> Tensor:
        """Return the piece in the box's shape; a copy where the view is interleaved."""
        return self.view.reshape(self.box_shape)

    def write(self, piece: Tensor) -> None:
        """Copy a piece of the box's shape into the live parameter."""
        with torch.no_grad():
            self.view.copy_(piece.reshape(self.view.shape))


def _narrowed(view: Tensor, dims: range, start: int, stop: int) -> Tensor:
    """View of start:stop of what these dims are together. Raises ValueError when that is no box of them."""
    for at in dims:
        unit = math.prod(view.shape[at + 1 : dims.stop])
        if start % unit == stop % unit == 0:
            return view.narrow(at, start // unit, (stop - start) // unit)
        group = start // unit
        start, stop = start - group * unit, stop - group * unit
        if stop > unit:
            break
        # Within one group: some of the heads that share a KV head, where a rollout has more tp ranks than KV heads.
        view = view.narrow(at, group, 1)
    raise ValueError(f"cut through a group of {unit}")


def shard_map(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh, of: str = "param"
) -> list[Shard]:
    """Return the shards of one pipeline stage, in the family's order. chunks: the stage, or its interleaved parts.

    of: "param" for the weights, buffers that are stored with them and adapters included; "main_grad" for the gradients
    behind those in training (same boxes).

    Raises RuntimeError listing parameters that the family's table does not name.
    """
    weights = table(chunks, shape)
    if shape.tied_embeddings and mesh.sizes.pp > 1:
        embedding = weights[EMBEDDING]
        tied = Weight("output_layer.weight", embedding.hf, embedding.shapes, "vocab")
        weights = {**weights, tied.name: tied}
    held = {name: view for chunk in chunks for name, view in global_tensors(chunk, mesh, of)}
    unknown = sorted(set(held) - set(weights))
    if unknown:
        raise RuntimeError(f"parameters without an entry in the {shape.family} table: {', '.join(unknown)}")
    # A name of the table that is not held is on another stage, or an expert of another rank.
    return [s for name, w in weights.items() if name in held for s in _cut(w, held[name], shape, mesh)]


def shard_fingerprints(shards: Sequence[Shard]) -> Fingerprints:
    """Return fingerprints of the live weights behind shards, which may be temporary (merged adapters): see
    `quintet.engine.weights.fingerprint`."""
    return fingerprints((one.name, one.shape, one.box, one.view) for one in shards)


def table(chunks: Sequence[torch.nn.Module], shape: ModelShape) -> Mapping[str, Weight]:
    """Return the entries of all weights of a model, by megatron-core's name, on whichever rank they are."""
    adapters: Any = getattr(chunks[0], "adapters", None)
    return _by_name(family_named(shape.family), shape, None if adapters is None else adapters.lora)


@lru_cache(maxsize=4)  # of one with many experts they are tens of thousands, and every sync reads them
def _by_name(family: Family, shape: ModelShape, lora: LoraShape | None) -> Mapping[str, Weight]:
    """family: that of the shape, whose file may have been loaded again."""
    weights = table_of(shape)
    low_rank = () if lora is None else adapter_weights(weights, lora)
    return {weight.name: weight for weight in (*weights, *low_rank)}


def stored_table(chunks: Sequence[Any], shape: ModelShape) -> Mapping[str, Weight]:
    """Return the entries of what a checkpoint holds: the model, or of one with adapters what is trained."""
    weights = table(chunks, shape)
    if getattr(chunks[0], "adapters", None) is None:
        return weights
    return {name: w for name, w in weights.items() if is_adapter(w.hf[0]) or name == "value_head.weight"}


def global_tensors(model: torch.nn.Module, mesh: Mesh, of: str = "param") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model under their names in the family's table, whatever the back end of layers calls them.

    A layer's number is that in the whole model, an expert's that among all experts. of: see `shard_map`.
    """
    for name, tensor in _stored(model):
        if of == "param" or tensor.requires_grad:
            behind = tensor.data if of == "param" else getattr(tensor, of)
            yield from _renamed(model, mesh, name, behind.view(tensor.shape))


def held_tensors(model: torch.nn.Module, mesh: Mesh) -> Iterator[tuple[str, Tensor, int]]:
    """Yield parameters and the buffers stored with them under their names in the table: name, the module's own tensor, and
    where in it, flattened, the named one begins (an expert's among all that a rank holds). Of tied embeddings the last stage's copy is
    named as the first's."""
    tied: Any = model.share_embeddings_and_output_weights
    for name, tensor in _stored(model):
        if tied and name == "output_layer.weight":
            name = EMBEDDING
        for entry, view in _renamed(model, mesh, name, tensor.detach()):
            yield entry, tensor, int(view.storage_offset() - tensor.storage_offset())


def _renamed(model: Any, mesh: Mesh, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a module's tensor is in the table: one entry, or one an expert."""
    found = _LAYER.match(name)
    if not found:
        yield name, tensor
        return
    prefix, number, rest = found.groups()
    if number is not None:
        prefix = f"decoder.layers.{model.decoder.layers[int(number)].layer_number - 1}."
    experts = (model.config.num_moe_experts or 0) // mesh.sizes.ep
    for inner, view in _experts_apart(rest, tensor, mesh.at("ep") * experts):
        yield prefix + _NORMS.get(inner, inner), view


_LAYER = re.compile(r"(decoder\.layers\.(\d+)\.|mtp\.layers\.\d+\.transformer_layer\.)(.*)")

_NORMS = {f"{linear}.layer_norm_weight": norm for norm, linear in FUSED_NORMS.items()}
"""By the name that a norm has within the linear layer after it."""


def _stored(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that are stored with them."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def _experts_apart(name: str, tensor: Tensor, first: int) -> Iterator[tuple[str, Tensor]]:
    """One expert at a time, numbered from `first`: the portable back end holds all of a rank in one tensor,
    TransformerEngine has a tensor each."""
    stacked = re.fullmatch(r"mlp\.experts\.(weight|bias)([12])", name)
    apart = re.fullmatch(r"mlp\.experts\.linear_fc([12])\.weight(\d+)", name)
    adapters = re.fullmatch(r"mlp\.experts\.(linear_fc[12]\.lora_[AB]\..*)", name)
    if adapters:
        for i, view in enumerate(tensor, start=first):
            yield f"mlp.experts.{i}.{adapters[1]}", view
    elif stacked:
        for i, view in enumerate(tensor, start=first):
            yield f"mlp.experts.{i}.linear_fc{stacked[2]}.{stacked[1]}", view
    elif apart:
        number = first + int(apart[2])
        yield f"mlp.experts.{number}.linear_fc{apart[1]}.weight", tensor
    else:
        yield name, tensor


def whole(weight: Weight, tensor: Tensor, shape: ModelShape) -> list[Shard]:
    """Return the shards of one parameter that is held in full."""
    return _cut(weight, tensor, shape, alone())


def _cut(weight: Weight, tensor: Tensor, shape: ModelShape, mesh: Mesh) -> list[Shard]:
    """The shards of one parameter, given this rank's part of it."""
    expert = weight.split.startswith("expert_")
    parts, rank = (mesh.sizes.etp, mesh.at("etp")) if expert else (mesh.sizes.tp, mesh.at("tp"))
    split = weight.split.removeprefix("expert_")
    if weight.stack:
        return _cut_stacked(weight, weight.stack, tensor, rank, parts)
    full = weight.shapes[0]
    if split == "qkv":
        return _cut_qkv(weight, tensor, shape, rank, parts)
    if split == "gate_up":
        return [
            Shard(name, full, equal_part(full, 0, rank, parts), half)
            for name, full, half in zip(weight.hf, weight.shapes, tensor.chunk(2, 0), strict=True)
        ]
    if split == "vocab":
        rows = len(tensor)
        start, stop = min(rank * rows, full[0]), min((rank + 1) * rows, full[0])
        return [Shard(weight.hf[0], full, ((start, stop), *whole_box(full[1:])), tensor[: stop - start])]
    if split == "rows_halves_swapped":
        held, half = equal_part(full, 0, rank, parts)[0], full[1] // 2
        return [
            Shard(weight.hf[0], full, (held, (0, half)), tensor[:, half:]),
            Shard(weight.hf[0], full, (held, (half, full[1])), tensor[:, :half]),
        ]
    dim = {"replicated": None, "rows": 0, "columns": 1}[split]
    return [Shard(weight.hf[0], full, equal_part(full, dim, rank, parts), tensor, weight.trained)]


def _cut_qkv(weight: Weight, tensor: Tensor, shape: ModelShape, rank: int, tp: int) -> list[Shard]:
    """Rows lie as [group][q heads of the group, k, v][head_dim]; a rank holds whole groups."""
    groups = shape.kv_heads // tp
    queries = shape.heads // shape.kv_heads
    by_group = tensor.view(groups, queries + 2, shape.head_dim, *tensor.shape[1:])
    views = (by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1])
    return [
        Shard(name, full, equal_part(full, 0, rank, tp), view)
        for name, full, view in zip(weight.hf, weight.shapes, views, strict=True)
    ]


def _cut_stacked(weight: Weight, stack: Stack, tensor: Tensor, rank: int, parts: int) -> list[Shard]:
    """One expert's part of a tensor that holds all of them."""
    split = weight.split.removeprefix("expert_")
    shape = weight.shapes[0]
    halves: list[tuple[Box, Tensor]] = []  # of one expert's matrix, outputs before inputs
    if split == "gate_up":
        (start, stop), *rest = equal_part(shape, 0, rank, parts)
        if stack.interleaved:
            halves.append((((2 * start, 2 * stop), *rest), tensor.unflatten(0, (2, -1)).transpose(0, 1)))
        else:
            for half, view in enumerate(tensor.chunk(2, 0)):
                halves.append((((start + half * shape[0], stop + half * shape[0]), *rest), view))
    else:
        dim = {"replicated": None, "columns": 1}[split]
        halves.append((equal_part(shape, dim, rank, parts), tensor))
    name, full = weight.tensors[0]
    shards = []
    # Views are [rows, columns], interleaved [rows, 2, columns]; of a bias, without the columns.
    for box, view in halves:
        if stack.transposed and len(box) == 2:
            box, view = box[::-1], view.movedim(-1, 0)
        shards.append(Shard(name, full, ((stack.expert, stack.expert + 1), *box), view[None]))
    return shards
