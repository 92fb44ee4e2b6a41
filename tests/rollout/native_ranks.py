"""What tests of the native back end run on each rank: a rollout with a model of its own, and where its weights come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from quintet.models.mcore import meet
from quintet.rollout.base import Piece, Wanted
from tests.rollout.prompts import text

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
}


def own_rollout(
    path: Path, layout: dict[str, Any], decode: Any = text, dtype: str = "fp32", **how: Any
) -> Any:
    """A rollout that has a model of its own, without weights yet."""
    import torch.distributed as dist

    from quintet.engine import build
    from quintet.engine.engine import DTYPES
    from quintet.models import read_shape
    from quintet.recipe import schema
    from quintet.rollout.native.rollout import NativeRollout

    shape, wanted = read_shape(path).without_mtp(), schema.Layout(**layout)
    mesh = build.mesh_of(wanted, dist.get_world_size())
    (model,) = build.build_chunks(shape, wanted, mesh, DTYPES[dtype], schema.Engine())
    model.requires_grad_(False)
    return NativeRollout(model, mesh, slots=8, decode=decode, **how)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}


class FileSource:
    """The wanted parts of tensors in memory; of matrices the left and the right half one after the other."""

    def __init__(self, held: dict[str, torch.Tensor], wanted: list[Wanted] | None) -> None:
        assert wanted is not None
        self.held, self.wanted = held, wanted

    def batches(self, receiver: int) -> Iterator[list[Piece]]:
        for piece in self.pieces(receiver):
            yield [piece]

    def pieces(self, receiver: int) -> Iterator[Piece]:
        assert receiver == 0
        for one in self.wanted:
            whole = self.held[one.name]
            halves = [one.box]
            first, last = one.box[-1]
            if len(one.box) == 2 and last - first > 1:
                middle = (first + last) // 2
                halves = [(one.box[0], ends) for ends in ((first, middle), (middle, last))]
            for box in halves:
                # Good until the next is asked for, and no longer.
                part = whole[tuple(slice(*ends) for ends in box)].clone()
                yield Piece(one.name, tuple(whole.shape), box, part)
                part.fill_(99)


def flip(held: dict[str, torch.Tensor], name: str) -> None:
    """One bit of one element, in the middle."""
    changed = held[name].clone()
    flat = changed.view(torch.int32).view(-1)
    flat[len(flat) // 2] ^= 1
    held[name] = changed


def swap(held: dict[str, torch.Tensor], first: str, second: str) -> None:
    held[first], held[second] = held[second], held[first]


def change_live(rollout: Any, name: str, change: Callable[[torch.Tensor], None]) -> None:
    """Change what this rank holds of the tensor."""
    for shard in rollout._weights._held():
        if shard.name == name:
            whole = shard.read().clone()
            change(whole)
            shard.write(whole)


def swap_live(rollout: Any, first: str, second: str) -> None:
    """Two experts trade places on this rank, in live memory."""
    held = {shard.name: shard for shard in rollout._weights.shards()}
    one, other = held[first].read().clone(), held[second].read().clone()
    held[first].write(other)
    held[second].write(one)


def within(box: Any, point: tuple[int, ...]) -> bool:
    return meet(box, tuple((i, i + 1) for i in point)) is not None
