"""What tests plant in the weights of a rollout that shares the trainer's processes, on the way to it and once they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from quintet.cluster.worker import Place
from quintet.controller import in_process_rollout as in_the_trainer
from quintet.controller.in_process_rollout import InProcessRollout
from quintet.controller.worker import PolicyWorker
from quintet.engine.engine import Engine
from quintet.engine.weights.shards import Shard, shard_fingerprints
from quintet.models import read_shape
from quintet.recipe import schema

TENSOR = "model.layers.1.self_attn.o_proj.weight"
EXPERTS = [f"model.layers.1.mlp.experts.{number}.down_proj.weight" for number in (0, 3)]
PLANTS = ["nothing", *(f"{what} {when}" for what in ("flip", "drop", "swap") for when in ("before", "after"))]


def flip(shards: Sequence[Shard]) -> None:
    """One bit of one element of the tensor's part that begins it."""
    for shard in shards:
        if shard.name == TENSOR and not any(start for start, _ in shard.box):
            changed = shard.read().clone()
            changed.view(torch.int32).view(-1)[7] ^= 1
            shard.write(changed)


def swap(shards: Sequence[Shard]) -> None:
    """Two experts of one layer trade places, where they are held."""
    held = [shard for shard in shards if shard.name in EXPERTS]
    for shard, tensor in zip(held, [shard.read().clone() for shard in reversed(held)], strict=True):
        shard.write(tensor)


def sync(rollout: InProcessRollout, engine: Engine, plant: str) -> None:
    """`InProcessRollout.update_weights` with a fault. before: the engine has other weights while they travel; after: the live copy."""
    live = rollout._weights.shards()
    what, _, when = plant.partition(" ")
    changes: dict[str, Callable[[Sequence[Shard]], None]] = {"flip": flip, "swap": swap}
    here = engine.shard_map()
    kept = [shard.read().clone() for shard in here]
    if when == "before" and what in changes:
        changes[what](here)
    old = {shard.name: shard.read().clone() for shard in live}
    rollout.update_weights()
    for shard, tensor in zip(here, kept, strict=True):
        shard.write(tensor)
    if when == "after" and what in changes:
        changes[what](live)
    if plant == "drop after":
        next(shard for shard in live if shard.name == TENSOR).write(old[TENSOR])


def told(path: Path, plants: Sequence[str]) -> dict[str, tuple[Any, Any, Any]]:
    """On one of two ranks: train with experts apart, generate with all of them here; what both sides tell of each sync."""
    shape = read_shape(path)
    recipe = schema.Recipe(
        cluster=schema.Cluster(ranks=2),
        layout=schema.Layout(ep=2),
        rollout=schema.Rollout(layout=schema.RolloutLayout(tp=1)),
    )
    engine = Engine(shape, recipe.layout, engine=recipe.engine, optimizer=None, dtype="fp32")
    engine.load_hf(path)
    found = {}
    for plant in plants:
        resharder = in_the_trainer.Resharder
        if plant == "drop before":
            in_the_trainer.Resharder = _without_one  # type: ignore[assignment,misc]
        try:
            rollout = InProcessRollout(engine, recipe, str, lambda done: None)
        finally:
            in_the_trainer.Resharder = resharder  # type: ignore[misc]
        for shard in rollout._weights.shards():
            shard.write(torch.zeros(shard.box_shape))
        sync(rollout, engine, plant)
        exported = engine.exported()
        shapes = {shard.name: shard.shape for shard in exported}
        found[plant] = (shard_fingerprints(exported), rollout.fingerprints()[0], shapes)
    return found


def _without_one(sources: list[Shard], targets: list[Shard], **how: Any) -> Any:
    sources, targets = ([one for one in side if one.name != TENSOR] for side in (sources, targets))
    from quintet.engine.weights.reshard import Resharder

    return Resharder(sources, targets, **how)


class Flipping(PolicyWorker):
    """A rank whose rollout changes one element of what it got, on rank 1, once training has changed the weights."""

    def __init__(self, place: Place, **how: Any) -> None:
        super().__init__(place, **how)
        self.syncs = 0

    def setup(self) -> None:
        super().setup()
        update = self.rollout.update_weights

        def flipping(source: None) -> int:
            came = update(source)
            self.syncs += 1
            if self.rank == 1 and self.syncs == 2:
                flip(self.rollout.backend._weights.shards())  # type: ignore[attr-defined]
            return came

        self.rollout.update_weights = flipping  # type: ignore[assignment]
