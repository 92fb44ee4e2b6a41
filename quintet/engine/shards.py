"""The shard map: which part of which Hugging Face tensor this rank holds, and where.

It is the one description of weights. Loading, exporting, resharding into another layout and fingerprints all
read it. A piece is a box of the full tensor (a start and a stop along each dim) and a view of the parameter that
holds it, so writing through the view changes the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.engine.mesh import Mesh
from quintet.models import ModelShape, Weight, family_named

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each dim of the full Hugging Face tensor."""


@dataclass
class Shard:
    """One rank's piece of one Hugging Face tensor.

    name: the Hugging Face name. shape: of the full tensor. box: the part held here. view: of the live parameter;
    it has the box's elements in the box's order but may have more dims (interleaved q, k and v).
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    view: Tensor

    @property
    def box_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    def part(self, box: Box) -> Tensor:
        """View of a box (in the full tensor's coordinates) that lies within this shard's.

        Raises ValueError when the box cuts through an interleaved group.
        """
        rows = self.box[0][1] - self.box[0][0]
        unit = (
            rows // self.view.shape[0] if rows else 1
        )  # rows of the full tensor in one step of the view's dim 0
        (start, stop), offset = box[0], self.box[0][0]
        if (start - offset) % unit or (stop - offset) % unit:
            raise ValueError(f"{self.name}: rows {start}:{stop} cut through a group of {unit}")
        view = self.view[(start - offset) // unit : (stop - offset) // unit]
        inner = self.view.dim() - len(self.box)
        for dim, ((a, b), (first, last)) in enumerate(
            zip(box[1:], self.box[1:], strict=True), start=1 + inner
        ):
            if (a, b) != (first, last):
                view = view.narrow(dim, a - first, b - a)
        return view

    def read(self) -> Tensor:
        """The piece in the box's shape; a copy where the view is interleaved."""
        return self.view.reshape(self.box_shape)

    def write(self, piece: Tensor) -> None:
        """Copy a piece of the box's shape into the live parameter."""
        with torch.no_grad():
            self.view.copy_(piece.reshape(self.view.shape))


def shard_map(model: torch.nn.Module, shape: ModelShape, mesh: Mesh, of: str = "param") -> list[Shard]:
    """Shards of one pipeline stage, in the family's order.

    of: "param" for the weights, "main_grad" for the gradients behind them (same boxes).

    Raises RuntimeError listing parameters that the family's table does not name, or names that have none.
    """
    weights = {w.name: w for w in family_named(shape.family).weights(shape)}
    if shape.tied_embeddings and mesh.sizes.pp > 1:
        embedding = weights["embedding.word_embeddings.weight"]
        weights["output_layer.weight"] = Weight(
            "output_layer.weight", embedding.hf, embedding.shapes, "vocab"
        )
    parameters = dict(global_parameters(model))
    unknown = sorted(set(parameters) - set(weights))
    if unknown:
        raise RuntimeError(f"parameters without an entry in the {shape.family} table: {', '.join(unknown)}")
    shards: list[Shard] = []
    for name, weight in weights.items():
        parameter = parameters.get(name)
        if parameter is None:  # on another stage
            continue
        tensor = parameter.data if of == "param" else getattr(parameter, of)
        shards += _cut(weight, tensor.view(parameter.shape), shape, mesh)
    return shards


def global_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Named parameters, with the layer's number in the whole model instead of its place in the stage."""
    layers: Any = model.decoder.layers  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if found:
            number = layers[int(found[1])].layer_number - 1
            name = f"decoder.layers.{number}.{found[2]}"
        yield name, parameter


def _cut(weight: Weight, tensor: Tensor, shape: ModelShape, mesh: Mesh) -> list[Shard]:
    tp, rank = mesh.sizes.tp, mesh.at("tp")
    full = weight.shapes[0]
    if weight.split == "replicated":
        return [Shard(weight.hf[0], full, _box(full), tensor)]
    if weight.split == "rows":
        return [Shard(weight.hf[0], full, _box(full, 0, rank, tp), tensor)]
    if weight.split == "columns":
        return [Shard(weight.hf[0], full, _box(full, 1, rank, tp), tensor)]
    if weight.split == "vocab":
        rows = len(tensor)
        start, stop = min(rank * rows, full[0]), min((rank + 1) * rows, full[0])
        return [Shard(weight.hf[0], full, ((start, stop), *_box(full)[1:]), tensor[: stop - start])]
    if weight.split == "gate_up":
        halves = tensor.chunk(2, 0)
        return [
            Shard(name, full, _box(full, 0, rank, tp), half)
            for name, full, half in zip(weight.hf, weight.shapes, halves, strict=True)
        ]
    return _cut_qkv(weight, tensor, shape, rank, tp)


def _cut_qkv(weight: Weight, tensor: Tensor, shape: ModelShape, rank: int, tp: int) -> list[Shard]:
    """Rows lie as [group][q heads of the group, k, v][head_dim]; a rank holds whole groups."""
    groups = shape.kv_heads // tp
    queries = shape.heads // shape.kv_heads
    by_group = tensor.view(groups, queries + 2, shape.head_dim, *tensor.shape[1:])
    views = (by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1])
    return [
        Shard(name, full, _box(full, 0, rank, tp), view)
        for name, full, view in zip(weight.hf, weight.shapes, views, strict=True)
    ]


def _box(full: tuple[int, ...], dim: int | None = None, rank: int = 0, parts: int = 1) -> Box:
    """The whole tensor, or the rank-th of equal parts along one dim."""
    box = [(0, n) for n in full]
    if dim is not None:
        step = full[dim] // parts
        box[dim] = (rank * step, (rank + 1) * step)
    return tuple(box)
