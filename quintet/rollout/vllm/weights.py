"""How one of vLLM's workers takes weights, and tells what it has.

The first time, and where the back end keeps weights in a form of its own, they go through vLLM's loaders, which take whole
tensors. Where all parameters are plain, later pieces are copied to their places. The first time shows which parts of tensors the
loaders read, so that later only those have to come: the loaders then find zeros around them.

vLLM leaves out in silence what its model has no place for, and keeps what it had where nothing comes. Here either is found.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any

import torch
from torch import Tensor

from quintet.engine.copies import copy_all, without_collections
from quintet.engine.weights.fingerprint import fingerprint
from quintet.errors import SyncMismatch
from quintet.models.mcore import Box, meet, volume, whole_box
from quintet.models.weights_on_disk import listed
from quintet.rollout.base import Fingerprints, Piece, Wanted
from quintet.rollout.vllm.load_trace import Record, Trace
from quintet.rollout.vllm.param_map import Copying, Live
from quintet.rollout.vllm.worker_models import WorkerModels
from quintet.typed import AsPairs

Load = Callable[[Iterator[tuple[str, Tensor]]], None]
"""Loads whole tensors by their Hugging Face names; each is nobody else's."""


@dataclass
class LoadReport:
    """What one worker took. missing: tensors that did not come, in Hugging Face names where those can be told. odd: what came in
    another shape than before, or was not all there. untaken: tensors that have no place in this worker's model."""

    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    untaken: set[str] = field(default_factory=set)


@dataclass
class Reading:
    """Fingerprints of one worker's weights: live ones, and of what is unreadable or has no place those of what arrived."""

    fingerprints: Annotated[Fingerprints, AsPairs()]
    unreadable: set[str]
    untaken: set[str]


class Weights:
    """The weights of one worker. load: loads both models. idle: whether a name is of a tensor that only a model that drafts has,
    and none does here."""

    def __init__(self, models: WorkerModels, load: Load, idle: Callable[[str], bool]) -> None:
        self._models, self._load, self._idle = models, load, idle
        self._live: Live | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._untaken = set[str]()
        self._boxes: dict[str, list[Box]] = {}
        self._arrived: dict[tuple[str, Box], Tensor] = {}

    def wanted(self) -> list[Wanted] | None:
        """Return the parts of tensors that this worker reads, known after a first `take`; None for whole tensors, also where it
        reads all of them. What no model here uses because none drafts comes all the same, so that it is proved to have come."""
        if all(self._boxes.get(name) == [whole_box(shape)] for name, shape in self._shapes.items()):
            return None
        return [Wanted(name, box) for name in sorted(self._boxes) for box in self._boxes[name]]

    @without_collections()
    def take(self, batches: Iterator[list[Piece]]) -> LoadReport:
        """Take new weights, of `WeightSource.batches`. What is wrong with them is told, not raised: `check` sees all workers' answers."""
        with torch.no_grad():
            if self._live and self._live.copyable:
                taken = self._copy(self._live, batches)
            else:
                taken = self._through_loaders(chain.from_iterable(batches))
            if self._live:
                self._live.end()
        taken.untaken = {name for name in taken.untaken if not self._idle(name)}
        return taken

    def read(self) -> Reading:
        """Return fingerprints of the live weights. Raises SyncMismatch before any were taken, and where two copies differ."""
        if self._live is None:
            raise SyncMismatch("this vLLM worker has not taken any weights yet: there is nothing to compare")
        live, unreadable = self._live.read()
        arrived: Fingerprints = {}
        if self._arrived:
            values = torch.stack([*self._arrived.values()]).tolist()
            arrived = dict(zip(self._arrived, values, strict=True))
        return Reading(arrived | live, unreadable, self._untaken)

    def _copy(self, live: Live, batches: Iterator[list[Piece]]) -> LoadReport:
        taken, copying = LoadReport(untaken=set(self._untaken)), live.begin()
        self._arrived = {}
        for batch in batches:
            copy_all(pair for piece in batch for pair in self._places(piece, copying, taken))
        taken.missing = copying.missing()
        return taken

    def _places(self, piece: Piece, copying: Copying, taken: LoadReport) -> Iterable[tuple[Tensor, Tensor]]:
        """Where a piece goes, and what of it; what is wrong with it is noted."""
        taken.bytes += piece.tensor.nbytes
        if piece.name in self._untaken:
            self._arrived[piece.name, piece.box] = fingerprint(piece.tensor, piece.shape, piece.box)
        if self._shapes.get(piece.name) == piece.shape:
            return copying.places(piece)
        if piece.name in self._shapes:
            taken.odd.append(_reshaped(piece, self._shapes[piece.name]))
        else:
            taken.untaken.add(piece.name)
        return ()

    def _through_loaders(self, pieces: Iterator[Piece]) -> LoadReport:
        taken, known = LoadReport(), dict(self._shapes)
        trace = None if self._live else Trace(self._models.named_tensors)
        came: dict[str, tuple[int, ...]] = {}
        self._arrived = {}
        kept = None if self._live is None else self._live.unreadable | self._untaken
        ended = False

        def feed() -> Iterator[tuple[str, Tensor]]:
            nonlocal ended
            for name, tensor in _whole(pieces, taken, self._boxes):
                shape = tuple(tensor.shape)
                if known and known.get(name) != shape:
                    if name in known:
                        taken.odd.append(f"{name} {list(shape)}, before {list(known[name])}")
                    else:
                        taken.untaken.add(name)
                    continue
                came[name] = shape
                self._arrive(name, tensor, kept)
                if trace is not None:
                    trace.follow(name, tensor)
                yield name, tensor
            ended = True

        with trace or nullcontext():
            self._load(feed())
        if not ended:
            raise RuntimeError("vLLM's loader did not take all tensors that came")
        if trace is None:
            taken.missing = sorted(self._boxes.keys() - came.keys())
            taken.untaken |= self._untaken
            return taken
        taken.missing = _missing(trace.record, self._models, came)
        taken.untaken |= {n for n in came if n not in trace.record.regions and n not in trace.record.mixed}
        if not taken.missing:
            self._live = Live(trace.record, self._models)
            self._shapes, self._untaken = came, set(taken.untaken)
            self._boxes = self._live.boxes(came)
            self._boxes |= {name: [whole_box(came[name])] for name in self._untaken if self._idle(name)}
            kept = self._live.unreadable | self._untaken
            self._arrived = {key: value for key, value in self._arrived.items() if key[0] in kept}
        return taken

    def _arrive(self, name: str, tensor: Tensor, kept: set[str] | None) -> None:
        """Note of a tensor on its way what cannot be read later. kept: names of which to; None is all."""
        if kept is None or name in kept:
            shape = tuple(tensor.shape)
            for box in self._boxes.get(name, [whole_box(shape)]):
                part = tensor[tuple(slice(*side) for side in box)]
                self._arrived[name, box] = fingerprint(part, shape, box)


def check(answers: Sequence[LoadReport]) -> None:
    """Raise SyncMismatch unless every worker got all it needs and every tensor has a place in some worker."""
    untaken = set.intersection(*(a.untaken for a in answers))
    for what, names in (
        ("vLLM got in another shape, or not all of", {name for a in answers for name in a.odd}),
        ("vLLM did not get", {name for a in answers for name in a.missing}),
        ("vLLM's model has no place for", untaken),
    ):
        if names:
            raise SyncMismatch(f"{what} {listed(sorted(names))}: its weights are not the engine's")


def combine(readings: Sequence[Reading]) -> tuple[Fingerprints, list[str]]:
    """Return fingerprints of all workers' weights, and the names of the unreadable ones; as `Rollout.fingerprints` tells.

    Of unreadable tensors, and of those that no worker has a place for, there are fingerprints of what arrived.
    Raises SyncMismatch where workers differ.
    """
    found: Fingerprints = {}
    placeless = set.intersection(*(r.untaken for r in readings))
    for reading in readings:
        for key, value in reading.fingerprints.items():
            if key[0] in reading.untaken - placeless:
                continue  # another worker has it
            if found.setdefault(key, value) != value:
                raise SyncMismatch(f"{key[0]}: two of vLLM's workers hold different weights in {key[1]}")
    return found, sorted(set[str]().union(*(r.unreadable for r in readings)))


def _whole(
    pieces: Iterator[Piece], taken: LoadReport, boxes: Mapping[str, list[Box]]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of whole size, each in its own memory, once these parts of them (where none are given, all) are there; what never
    is complete is told."""
    parts: dict[str, tuple[Tensor, int]] = {}
    for piece in pieces:
        taken.bytes += piece.tensor.nbytes
        if volume(piece.box) == math.prod(piece.shape):
            yield piece.name, piece.tensor.clone(memory_format=torch.contiguous_format)
            continue
        needed = boxes.get(piece.name, [whole_box(piece.shape)])
        found = sum(volume(both) for box in needed if (both := meet(box, piece.box)) is not None)
        if not found:
            continue
        whole, left = parts.pop(piece.name, (None, sum(map(volume, needed))))
        if whole is None:
            whole = torch.zeros(piece.shape, dtype=piece.tensor.dtype, device=piece.tensor.device)
        if tuple(whole.shape) != piece.shape:
            taken.odd.append(_reshaped(piece, tuple(whole.shape)))
            continue
        whole[tuple(slice(*side) for side in piece.box)] = piece.tensor
        left -= found
        if left > 0:
            parts[piece.name] = (whole, left)
        else:
            yield piece.name, whole
    taken.odd += [f"{name} ({left} of {whole.numel()} elements)" for name, (whole, left) in parts.items()]


def _reshaped(piece: Piece, before: tuple[int, ...]) -> str:
    return f"{piece.name} {list(piece.shape)}, before {list(before)}"


def _missing(record: Record, models: WorkerModels, came: Iterable[str]) -> list[str]:
    """What a first load left out: in Hugging Face names, which the same layer elsewhere in the model tells, or in vLLM's."""
    fed = defaultdict[str, set[str]](set)
    for name, regions in record.regions.items():
        for region in regions:
            fed[region.parameter].add(name)
    missing = set[str]()
    for parameter, _ in models.named_tensors(buffers=False):
        if _DERIVED.search(parameter) or _only_pads(models.owner(parameter)[0]):
            continue
        left, elements = record.unwritten(parameter) if parameter in record.loaded else (1, 1)
        if left:
            names = _as_elsewhere(parameter, fed) - set(came)
            missing |= names or {
                parameter if left == elements else f"{parameter} ({left} of {elements} elements)"
            }
    return sorted(missing)


_DERIVED = re.compile(r"\.(W_UV|W_UK_T|W_[KV](_scale)?|(q|k|v|prob|input)_scale)$")
"""Parameters that vLLM makes itself."""


def _only_pads(layer: Any) -> bool:
    """Whether a layer is a part of a vocabulary so small that it has no token of it, and nothing is loaded into it."""
    return getattr(getattr(layer, "shard_indices", None), "num_org_elements", 1) == 0


def _as_elsewhere(parameter: str, fed: Mapping[str, set[str]]) -> set[str]:
    """The names of tensors that a parameter would be loaded from if it were as in another layer."""
    number, alike = _NUMBER.search(parameter), _NUMBER.sub(".*.", parameter, 1)
    found = set[str]()
    for other, names in fed.items():
        its = _NUMBER.search(other)
        if number and its and its[1] != number[1] and _NUMBER.sub(".*.", other, 1) == alike:
            found |= {name.replace(its[0], number[0], 1) for name in names}
    return found


_NUMBER = re.compile(r"\.(\d+)\.")
