"""The model of one rank of a layout, built without its memory or the other ranks, against what is planned for it.

Parameters are on torch's meta device, which knows shapes alone, and process groups are of torch's fake back end, which gives any world in
one process. What is compared: the plan's parameters (`quintet.plan.parameters`, which has no torch) with the model's, the shard map's
boxes with its views, and over all ranks the boxes with the Hugging Face tensors.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from quintet.errors import UserError
from quintet.models import ModelShape, Weight, table_of
from quintet.models.mcore import Box, box_sizes, overlapping, volume
from quintet.plan.fullest import setup_of
from quintet.plan.parameters import chunks as planned_chunks
from quintet.recipe import schema

_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass
class Built:
    """What was found of some ranks: parameters and shards of each, boxes of every Hugging Face tensor, and what does not fit."""

    parameters: dict[int, int] = field(default_factory=dict)
    shards: dict[int, int] = field(default_factory=dict)
    boxes: dict[str, set[Box]] = field(default_factory=lambda: defaultdict(set))
    wrong: list[str] = field(default_factory=list)


def build_ranks(recipe: schema.Recipe, shape: ModelShape, ranks: Iterable[int]) -> Iterator[Built]:
    """Build the models of ranks one after the other, and yield what was found so far after each.

    Raises UserError for a rank that the recipe does not have, and for adapters.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed: the layers are those that are everywhere
    if recipe.lora is not None:
        raise UserError("lora: --build compares the model, not adapters beside it; set lora=null")
    found = Built()
    for rank in ranks:
        if not 0 <= rank < recipe.cluster.ranks:
            raise UserError(f"--build {rank}: the recipe has the ranks 0 to {recipe.cluster.ranks - 1}")
        with _world(rank, recipe.cluster.ranks):
            _build(recipe, shape, rank, found)
        yield found


def not_covered(found: Built, shape: ModelShape) -> list[str]:
    """Return the Hugging Face tensors that the boxes of all ranks together do not tile: a part that is nowhere, or boxes that overlap and
    are not the same."""
    wrong = []
    for name, full in {pair for weight in table_of(shape) for pair in weight.tensors}:
        boxes = found.boxes.get(name, set())
        held = sum(volume(box) for box in boxes)
        if held != math.prod(full) or overlapping(sorted(boxes)):
            wrong.append(
                f"{name} of shape {full}: the ranks hold {held:,} of {math.prod(full):,} elements in {len(boxes)} boxes"
            )
    return sorted(wrong)


@contextmanager
def _world(rank: int, size: int) -> Iterator[None]:
    """A default process group in which this is one rank of many, and no other is there."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kind: Any = FakeProcessGroup
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size, pg_options=kind.Options())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _build(recipe: schema.Recipe, shape: ModelShape, rank: int, found: Built) -> None:
    import torch

    from quintet.engine import build
    from quintet.engine.weights.shards import global_tensors, shard_map

    layout, dtype = recipe.layout, torch.float32 if recipe.model.dtype == "fp32" else torch.bfloat16
    engine = recipe.engine.without_fp8.model_copy(update={"backend": "portable"})
    mesh = build.mesh_of(layout, recipe.cluster.ranks)
    with torch.device("meta"):
        models = build.build_chunks(shape, layout, mesh, dtype, engine)
    stage, weights = mesh.at("pp"), {weight.name: weight for weight in table_of(shape)}
    for number, (planned, model) in enumerate(zip(_planned(recipe, shape, stage), models, strict=True)):
        held: Counter[str] = Counter()
        for name, tensor in global_tensors(model, mesh):
            if name not in weights or weights[name].trained:
                held[_EXPERT.sub(".experts.*.", name)] += tensor.numel()
        where = f"rank {rank}, chunk {number} of stage {stage}"
        found.wrong += _differences(where, planned, held)
    shards = shard_map(models, shape, mesh)
    for one in shards:
        if not _is_box(tuple(one.view.shape), one.box):
            found.wrong.append(
                f"rank {rank}: {one.name} has a view of {tuple(one.view.shape)} for the box {one.box}"
            )
        if one.view.numel():
            found.boxes[one.name].add(one.box)
    held_here = sum(p.numel() for model in models for p in model.parameters())
    mapped = sum(one.view.numel() for one in shards if one.trained)
    named = [pair for model in models for pair in global_tensors(model, mesh)]
    spare = sum(_padding(shape, weights, name, tensor, mesh.at("tp")) for name, tensor in named)
    if mapped + spare != held_here:
        found.wrong.append(
            f"rank {rank}: {held_here:,} elements of parameters, and shards of {mapped:,} with {spare:,} of the vocabulary's padding"
        )
    found.parameters[rank], found.shards[rank] = held_here, len(shards)


def _is_box(shape: tuple[int, ...], box: Box) -> bool:
    """Whether a view of this shape is the box's, whose dims it may cut into several: heads and what each has."""
    ends = set(accumulate(shape, operator.mul))
    return math.prod(shape) == volume(box) and ends.issuperset(accumulate(box_sizes(box), operator.mul))


def _planned(recipe: schema.Recipe, shape: ModelShape, stage: int) -> list[dict[str, int]]:
    setup = replace(setup_of(recipe, shape), optimizer=recipe.optimizer)
    return [{one.name: one.numel for one in part} for part in planned_chunks(setup, stage)]


def _differences(where: str, planned: dict[str, int], held: Counter[str]) -> Iterator[str]:
    for name in sorted(planned.keys() | held.keys()):
        if planned.get(name) != held.get(name):
            yield f"{where}: {name} has {held.get(name, 0):,} elements, planned are {planned.get(name, 0):,}"


def _padding(shape: ModelShape, weights: dict[str, Weight], name: str, tensor: Any, tp_rank: int) -> int:
    """Elements of an embedding's or a head's rows beyond the vocabulary."""
    if name != "output_layer.weight" and (name not in weights or weights[name].split != "vocab"):
        return 0
    rows, columns = tensor.shape
    inside = min(max(shape.vocab_size - tp_rank * rows, 0), rows)
    return int((rows - inside) * columns)
