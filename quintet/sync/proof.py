"""The proof of a sync: what the rollout holds is what the engine holds, tensor by tensor.

Both sides tell fingerprints of the parts that each of their ranks holds (`quintet.engine.weights.fingerprint`). Parts that several
ranks hold must be equal, the distinct parts must make up the whole tensor, and their sums must be the same on both sides.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quintet.errors import SyncMismatch
from quintet.models.lora import is_adapter
from quintet.models.mcore import Box, meet, overlapping, volume, whole_box
from quintet.models.weights_on_disk import listed
from quintet.sync.rank_fingerprints import Part, RankFingerprints, ShardIndex

NAMED = 10
"""Most tensors that a message names."""
RANKS_NAMED = 8
"""Most ranks that it names of those that hold one copy."""


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on both sides. kind: its class (`tensor_classes`). what: how it differs."""

    name: str
    kind: str
    what: str


def mismatch(differences: Sequence[Difference], rollout: str) -> SyncMismatch:
    """Return the error that says which tensors differ. rollout: its name, such as "rollout-0"."""
    count = len(differences)
    kinds = Counter(one.kind for one in differences)
    named = "; ".join(f"{one.name} ({one.kind}): {one.what}" for one in differences[:NAMED])
    more = f"; and {count - NAMED} more" if count > NAMED else ""
    return SyncMismatch(
        f"{rollout} does not hold the trainer's weights after the sync: {count} "
        f"{'tensor differs' if count == 1 else 'tensors differ'} "
        f"({', '.join(f'{n} {kind}' for kind, n in kinds.items())}): {named}{more}"
    )


Exported = tuple[Sequence[RankFingerprints], Sequence[int | None]]
"""What the trainer's ranks tell of a sync: of what is exported, and fingerprints of the fp32 masters."""


def exported_weights_unchanged(before: Exported, now: Exported) -> str | None:
    """Return what to say when masters have changed since the last sync and no exported tensor has; None otherwise."""
    changed = sum(a != b for a, b in zip(before[1], now[1], strict=True))
    if not changed or list(before[0]) != list(now[0]):
        return None
    return (
        f"the master weights of {changed} of {len(now[1])} ranks have changed since the last sync, and none of "
        "the tensors that the rollout gets has: it goes on with the old policy. Either steps are too small for the "
        "parameters' type (raise optimizer.lr, or use model.dtype=fp32), or updated masters do not reach the parameters"
    )


class Comparison:
    """A comparison of what ranks of the trainer hold with what those of a rollout hold: made once of their indexes, it tells of
    any values in a few steps over arrays which tensors differ."""

    def __init__(self, engine: Sequence[ShardIndex], rollout: Sequence[ShardIndex]) -> None:
        self._sides = _Side("trainer", engine), _Side("rollout", rollout)
        self._shapes = {name: shape for one in engine for name, shape in one.shapes.items()}
        there = self._sides[1].boxes
        unreadable = {name for one in rollout for name in one.unreadable}
        self._names = [*self._shapes, *(name for name in there if name not in self._shapes)]
        looked_at = [name for name in self._names if name not in unreadable or name in there]
        self._faults = {name: fault for name in looked_at if (fault := self._fault(name))}
        self._sound = [name for name in looked_at if name not in self._faults]
        self._at = [np.array([side.numbers[name] for name in self._sound], np.int64) for side in self._sides]

    def _fault(self, name: str) -> str:
        """How a tensor differs whatever the values are; nothing when it does not."""
        shape = self._shapes.get(name)
        if shape is None:
            return "the trainer has no such tensor"
        for side in self._sides:
            if name not in side.boxes:
                return f"missing on the {side.name}"
            if fault := _cover(tuple(side.boxes[name]), shape):
                return f"the {side.name}'s parts {fault}"
        return ""

    def differences(
        self, engine: Sequence[RankFingerprints], rollout: Sequence[RankFingerprints]
    ) -> list[Difference]:
        """Return the tensors that differ, in the order of the trainer's names, then those that only the rollout has. engine,
        rollout: of the ranks that this was made of.

        Raises SyncMismatch where a rank tells of other parts than those of its index.
        """
        heard = [side.heard(told) for side, told in zip(self._sides, (engine, rollout), strict=True)]
        ours, theirs = (
            side.look(values, at) for side, values, at in zip(self._sides, heard, self._at, strict=True)
        )
        odd = ours[1] | theirs[1] | (ours[0] != theirs[0])
        names = {self._sound[i] for i in np.flatnonzero(odd)}
        if not names and not self._faults:
            return []
        kinds = tensor_classes(self._names)
        held = [side.held(names, values) for side, values in zip(self._sides, heard, strict=True)]
        return [
            Difference(name, kinds[name], self._faults.get(name) or _difference(held[0][name], held[1][name]))
            for name in self._names
            if name in names or name in self._faults
        ]


_Parts = dict[Box, dict[int, list[int]]]
"""Of each part of one tensor the values that ranks tell, each with these ranks."""


class _Side:
    """Which parts of tensors the ranks of the trainer, or of a rollout, hold. Values come one rank after another, as one array."""

    def __init__(self, name: str, ranks: Sequence[ShardIndex]) -> None:
        self.name, self._ranks = name, ranks
        parts: dict[Part, int] = {}
        each = [parts.setdefault(part, len(parts)) for one in ranks for part in one.parts]
        self._part = np.array(each, np.int64)  # of each value
        self._first = np.unique(self._part, return_index=True)[1]  # of each part, the value told first
        self.boxes: dict[str, list[Box]] = {}
        for tensor, box in parts:
            self.boxes.setdefault(tensor, []).append(box)
        self.numbers = {tensor: number for number, tensor in enumerate(self.boxes)}
        self._tensor = np.array([self.numbers[tensor] for tensor, _ in parts], np.int64)  # of each part

    def heard(self, told: Sequence[RankFingerprints]) -> np.ndarray:
        """The ranks' values, uint64. Raises SyncMismatch where they are not of the parts that their ranks have told."""
        for rank, (index, one) in enumerate(zip(self._ranks, told, strict=True)):
            if one.index != index.digest or len(one.values) != 8 * len(index.parts):
                raise SyncMismatch(
                    f"rank {rank} of the {self.name} told {len(one.values) // 8} fingerprints of other parts than the "
                    f"{len(index.parts)} it holds"
                )
        return np.frombuffer(b"".join(one.values for one in told), np.uint64)

    def look(self, values: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the tensors of these numbers the sum over its parts, and whether ranks differ in one of them."""
        once = values[self._first]
        totals, apart = np.zeros(len(self.boxes), np.uint64), np.zeros(len(self.boxes), bool)
        np.add.at(totals, self._tensor, once)
        apart[self._tensor[self._part[values != once[self._part]]]] = True
        return totals[at], apart[at]

    def held(self, names: Collection[str], values: np.ndarray) -> dict[str, _Parts]:
        """What ranks tell of these tensors."""
        found: dict[str, _Parts] = {name: {} for name in names}
        parts = ((rank, part) for rank, one in enumerate(self._ranks) for part in one.parts)
        for (rank, (name, box)), value in zip(parts, values.tolist(), strict=True):
            if name in names:
                found[name].setdefault(box, {}).setdefault(value, []).append(rank)
        return found


def _difference(ours: _Parts, theirs: _Parts) -> str:
    """How a tensor's values differ that do."""
    for side, parts in (("trainer", ours), ("rollout", theirs)):
        for box, values in parts.items():
            if len(values) > 1:
                who = " other than ".join(map(_ranks, sorted(values.values(), key=len)))
                return f"the {side}'s ranks hold different copies of {_place(box)}: {who}"
    # Where both sides are cut alike, the part can be told, and who holds it.
    wrong = [box for box in ours if box in theirs and ours[box].keys() != theirs[box].keys()]
    if not wrong or len(ours) == 1:
        return "other values"
    (held,) = theirs[wrong[0]].values()
    holders = {rank for values in theirs.values() for ranks in values.values() for rank in ranks}
    by = f", held by {_ranks(held)}" if len(holders) > 1 else ""
    return f"other values at {_place(wrong[0])}{by}"


def _ranks(numbers: Sequence[int]) -> str:
    named = listed([str(number) for number in sorted(numbers)], RANKS_NAMED)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {named}"


def _place(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


@lru_cache(maxsize=4096)  # many tensors are cut alike
def _cover(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> str:
    """What keeps boxes from covering a tensor exactly once; nothing when they do."""
    full = whole_box(shape)
    outside = [box for box in boxes if len(box) != len(full) or meet(box, full) != box]
    if outside:
        return f"{_place(outside[0])} is not within its shape {list(shape)}"
    held, wanted = sum(map(volume, boxes)), math.prod(shape)
    if held < wanted:
        return f"are {held} of its {wanted} elements"
    return "overlap" if overlapping(boxes) else ""


def tensor_classes(names: Iterable[str]) -> dict[str, str]:
    """Return of each tensor of a model its class: adapter, scale, mtp, router, expert, embedding, norm, bias or dense.

    All names of the model together: whether a layer is for multi-token prediction shows in the tensors beside it.
    """
    names = list(names)
    marks = (_MTP.fullmatch(name) for name in names)
    mtp = tuple({mark[1] for mark in marks if mark})
    return {name: "mtp" if mtp and name.startswith(mtp) else _class_of(name) for name in names}


_MTP = re.compile(r"(.*\.)(?:eh_proj|enorm|hnorm|input_proj|token_layernorm|hidden_layernorm)\.weight")
"""What only layers for multi-token prediction have, beside a decoder layer's own."""

_CLASSES = {
    "scale": r".*_scale(_inv)?",
    "router": r".*\.(gate|router)(\.[^.]*)?",
    "expert": r".*\.experts\..*",
    "embedding": r".*(embed_tokens|lm_head)\.weight",
    "norm": r".*norm\d*\.weight",
    "bias": r".*(\.bias|_bias|\.sinks)",
}


def _class_of(name: str) -> str:
    if is_adapter(name):
        return "adapter"
    return next((kind for kind, pattern in _CLASSES.items() if re.fullmatch(pattern, name)), "dense")
