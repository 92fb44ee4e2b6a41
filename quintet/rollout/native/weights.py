"""The weights of a native rollout that has a model of its own: taken from a source, proved, put to sleep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from quintet.engine.copies import copy_all, without_collections
from quintet.engine.lora import split_adapters
from quintet.engine.mesh import Mesh
from quintet.engine.model import PolicyModel
from quintet.engine.offload import Offloader
from quintet.engine.weights.fingerprint import Fingerprints
from quintet.engine.weights.shards import Shard, shard_fingerprints, shard_map
from quintet.errors import SyncMismatch
from quintet.models.mcore import Box, box_sizes, meet, slices, volume
from quintet.rollout.base import Piece, Wanted, WeightSource


class Weights:
    """The weights of one rank. brought: whether a source brings them. Of a model with adapters these alone are brought; the rest
    is the model's from the start, and is proved with them: it was read elsewhere, and sleeps and wakes."""

    def __init__(self, model: PolicyModel, mesh: Mesh, *, brought: bool) -> None:
        self._model, self._mesh = model, mesh
        self._offloader = Offloader([model]) if brought else None
        self.undefined: str | None = "none have been brought yet" if brought else None
        """Why the weights are none, when they are."""

        # Made while the weights are there: storage that is away has no views, and those that there are stay good.
        self._standing = self._map() if brought else None

    def wanted(self) -> list[Wanted]:
        """Return the parts that this rank holds."""
        return [Wanted(shard.name, shard.box) for shard in self.shards()]

    def fingerprints(self) -> Fingerprints:
        """Return fingerprints of all live weights, those that are not brought included."""
        return shard_fingerprints(self._held())

    def shards(self) -> list[Shard]:
        """Return what is brought of the model, as far as this rank holds any of it."""
        held = self._held()
        return held if self._model.adapters is None else split_adapters(held)[1]

    def _held(self) -> list[Shard]:
        return self._map() if self._standing is None else self._standing

    def _map(self) -> list[Shard]:
        return [one for one in shard_map([self._model], self._model.shape, self._mesh) if volume(one.box)]

    @cached_property
    def _parts(self) -> dict[tuple[str, Box], Shard]:
        """What a source brings, by what its pieces say that they are."""
        return {(shard.name, shard.box): shard for shard in self.shards()}

    @without_collections()
    def take(self, source: WeightSource) -> None:
        """Copy every piece into place. Until all have come the weights are undefined.

        Raises SyncMismatch naming a tensor that did not come whole, came twice, or is none of this rank's; and one that
        comes in another type than the rollout has it in.
        """
        self.undefined = "the last ones did not arrive whole"
        taking = _Taking(self._parts)
        with torch.no_grad():
            for batch in source.batches(0):
                copy_all(pair for piece in batch for pair in taking.places(piece))
        taking.check()
        self.undefined = None

    def sleep(self, level: int) -> int:
        """Move the weights off the device; bytes. The frozen part of a model with adapters is not brought again: it is never forgotten."""
        forget = level == 2 and self._model.adapters is None
        assert self._offloader is not None
        left = self._offloader.offload(params=1.0, forget=forget)
        if forget and self.undefined is None:
            self.undefined = "they were forgotten in sleep (level 2)"
        return left

    def wake(self) -> int:
        """Move the weights to the device again; bytes."""
        assert self._offloader is not None
        return self._offloader.reload()


class _Taking:
    """One update: which parts have not come whole, and what has come of them. Most pieces are a part, and there may be ten thousands."""

    def __init__(self, shards: Mapping[tuple[str, Box], Shard]) -> None:
        self._shards, self._left = shards, dict(shards)
        self._came: dict[tuple[str, Box], list[Box]] = defaultdict(list)

    @cached_property
    def _by_name(self) -> dict[str, list[tuple[str, Box]]]:
        found: dict[str, list[tuple[str, Box]]] = defaultdict(list)
        for key in self._shards:
            found[key[0]].append(key)
        return found

    def places(self, piece: Piece) -> list[tuple[Tensor, Tensor]]:
        """Where a piece goes, and what of it goes there."""
        key = (piece.name, piece.box)
        whole = self._left.get(key)
        if whole is not None and key not in self._came and _fits(piece, whole):
            del self._left[key]
            return [(whole.view, piece.tensor)]
        if tuple(piece.tensor.shape) != box_sizes(piece.box):
            raise SyncMismatch(
                f"{piece.name}: {list(piece.tensor.shape)} elements came for its part {list(piece.box)}"
            )
        found = [
            self._place(one, piece)
            for one in ([key] if key in self._shards else self._by_name.get(key[0], ()))
        ]
        placed = [pair for pair in found if pair is not None]
        if not placed and volume(piece.box):
            raise SyncMismatch(
                f"{piece.name}: {list(piece.box)} came, and is no part of what this rank holds"
            )
        return placed

    def _place(self, key: tuple[str, Box], piece: Piece) -> tuple[Tensor, Tensor] | None:
        """What a piece has of a shard, if anything, after its place there."""
        shard = self._shards[key]
        part = meet(piece.box, shard.box) if len(piece.box) == len(shard.box) else None
        if part is None:
            return None
        target = shard.part(part)
        if piece.shape != shard.shape or piece.tensor.dtype != target.dtype:
            raise SyncMismatch(
                f"{piece.name}: the trainer sends {_told(piece.shape, piece.tensor)}, the rollout holds "
                f"{_told(shard.shape, target)}"
            )
        if key not in self._left or any(meet(part, other) for other in self._came[key]):
            raise SyncMismatch(f"{piece.name}: {list(part)} came twice")
        self._came[key].append(part)
        return target, piece.tensor[slices(piece.box, part)]

    def check(self) -> None:
        """Raise SyncMismatch unless all have."""
        lacking = [
            (shard, missing)
            for key, shard in self._left.items()
            if (missing := volume(shard.box) - sum(map(volume, self._came[key])))
        ]
        if lacking:
            shard, missing = lacking[0]
            raise SyncMismatch(
                f"{shard.name}: {missing} of {volume(shard.box)} elements did not come, and {len(lacking) - 1} other "
                "tensors are incomplete: the rollout's weights are undefined until all are brought"
            )


def _fits(piece: Piece, shard: Shard) -> bool:
    """Whether the piece is the shard, as it should be."""
    alike = piece.shape == shard.shape and piece.tensor.dtype == shard.view.dtype
    return alike and tuple(piece.tensor.shape) == shard.box_shape


def _told(shape: tuple[int, ...], tensor: Tensor) -> str:
    return f"{list(shape)} in {str(tensor.dtype).removeprefix('torch.')}"
