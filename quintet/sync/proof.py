"""The proof of a sync: what the rollout holds is what the engine holds, tensor by tensor.

Both sides tell fingerprints of the parts that each of their ranks holds (`quintet.engine.weights.fingerprint`). Parts that several
ranks hold must be equal, the distinct parts must make up the whole tensor, and their sums must be the same on both sides.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quintet.engine.weights.fingerprint import Fingerprints
from quintet.errors import SyncMismatch
from quintet.models.lora import is_adapter
from quintet.models.mcore import Box, meet, volume, whole_box
from quintet.sync.witness import Digest, Inventory, Part, inventory_of

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


def compare(
    engine: Sequence[Fingerprints],
    rollout: Sequence[Fingerprints],
    shapes: Mapping[str, tuple[int, ...]],
    unreadable: Collection[str] = (),
) -> list[Difference]:
    """The tensors that differ, in the order of `shapes`, then those that only the rollout has.

    engine, rollout: of each rank. shapes: of every tensor that the engine sends. unreadable: tensors that the rollout
    cannot read back: nothing can be told of them here but whether they arrived right, where it has fingerprints of that.
    """
    held, values = [], []
    for side in (engine, rollout):
        found = [inventory_of(one, {}, ()) for one in side]
        held.append([inventory for inventory, _ in found])
        values.append(
            [
                np.fromiter(one.values(), np.int64, len(one))[order]
                for one, (_, order) in zip(side, found, strict=True)
            ]
        )
    return Comparison(held[0], held[1], shapes, unreadable).differences(*(Heard(side) for side in values))


def mismatch(differences: Sequence[Difference], rollout: str) -> SyncMismatch:
    """The error that says which tensors differ. rollout: its name, such as "rollout-0"."""
    count = len(differences)
    kinds = Counter(one.kind for one in differences)
    named = "; ".join(f"{one.name} ({one.kind}): {one.what}" for one in differences[:NAMED])
    more = f"; and {count - NAMED} more" if count > NAMED else ""
    return SyncMismatch(
        f"{rollout} does not hold the trainer's weights after the sync: {count} "
        f"{'tensor differs' if count == 1 else 'tensors differ'} "
        f"({', '.join(f'{n} {kind}' for kind, n in kinds.items())}): {named}{more}"
    )


@dataclass(frozen=True)
class Told:
    """What the trainer's ranks tell of a sync: digests of what is exported, and fingerprints of the fp32 masters."""

    exported: Sequence[Digest]
    masters: Sequence[int | None]


def exported_weights_unchanged(before: Told, now: Told) -> str | None:
    """What to say when masters have changed since the last sync and no exported tensor has; None otherwise."""
    changed = [i for i, (a, b) in enumerate(zip(before.masters, now.masters, strict=True)) if a != b]
    if not changed or any(a != b for a, b in zip(before.exported, now.exported, strict=True)):
        return None
    return (
        f"the master weights of {len(changed)} of {len(now.masters)} ranks have changed since the last sync, and none of "
        "the tensors that the rollout gets has: it goes on with the old policy. Either steps are too small for the "
        "parameters' type (raise optimizer.lr, or use model.dtype=fp32), or updated masters do not reach the parameters"
    )


@dataclass(frozen=True)
class Heard:
    """Values from one side. values: of each inventory that the comparison was made for, int64 in its order. ranks: who tells each
    of them, by number; None where each has one rank."""

    values: Sequence[np.ndarray]
    ranks: Sequence[Sequence[int]] | None = None


class Comparison:
    """Of what ranks of the trainer hold with what those of a rollout hold, by their inventories: made once, it tells of any
    values in a few steps over arrays which tensors differ. shapes, unreadable: as in `compare`.
    """

    def __init__(
        self,
        engine: Sequence[Inventory],
        rollout: Sequence[Inventory],
        shapes: Mapping[str, tuple[int, ...]],
        unreadable: Collection[str] = (),
    ) -> None:
        self._sides = _Side(engine), _Side(rollout)
        self._shapes = shapes
        there = self._sides[1].boxes
        self._names = [*shapes, *(name for name in there if name not in shapes)]
        looked_at = [name for name in self._names if name not in unreadable or name in there]
        self._unsound = {name for name in looked_at if self._fault(name)}
        self._sound = [name for name in looked_at if name not in self._unsound]
        self._at = [side.numbers(self._sound) for side in self._sides]

    def _fault(self, name: str) -> bool:
        """Whether a tensor differs whatever the values are."""
        shape = self._shapes.get(name)
        if shape is None:
            return True
        found = [side.boxes.get(name) for side in self._sides]
        return any(boxes is None or _cover(tuple(boxes), shape) for boxes in found)

    def differences(self, engine: Heard, rollout: Heard) -> list[Difference]:
        """The tensors that differ, in order: see `compare`."""
        flat = [np.concatenate([*one.values, np.zeros(0, np.int64)]) for one in (engine, rollout)]
        odd = np.zeros(len(self._sound), bool)
        totals = []
        for side, values, at in zip(self._sides, flat, self._at, strict=True):
            sums, apart = side.look(values)
            odd |= apart[at]
            totals.append(sums[at])
        odd |= totals[0] != totals[1]
        suspects = self._unsound | {self._sound[i] for i in np.flatnonzero(odd)}
        if not suspects:
            return []
        kinds = tensor_classes(self._names)
        found = []
        for name in self._names:
            if name in suspects:
                ours, theirs = (
                    side.told(name, values, heard.ranks)
                    for side, values, heard in zip(self._sides, flat, (engine, rollout), strict=True)
                )
                found.append(Difference(name, kinds[name], _difference(ours, theirs, self._shapes.get(name))))
        return found


class _Side:
    """Which parts of tensors ranks hold. Their values come one rank after another, as one array: an entry is one of these."""

    def __init__(self, ranks: Sequence[Inventory]) -> None:
        parts: dict[Part, int] = {}
        entries = (parts.setdefault(part, len(parts)) for one in ranks for part in one.parts)
        self._part = np.fromiter(entries, np.int64, sum(len(one.parts) for one in ranks))  # of each entry
        self._rank = np.repeat(np.arange(len(ranks)), [len(one.parts) for one in ranks])
        self._by_part = np.argsort(self._part, kind="stable")  # entries
        self._begin = np.searchsorted(self._part[self._by_part], np.arange(len(parts) + 1))
        self.boxes: dict[str, dict[Box, int]] = {}
        """The parts of each tensor, with their numbers."""
        for (name, box), number in parts.items():
            self.boxes.setdefault(name, {})[box] = number
        self._number = {name: number for number, name in enumerate(self.boxes)}
        self._tensor = self.numbers(name for name, _ in parts)  # of each part

    def numbers(self, names: Iterable[str]) -> np.ndarray:
        """Of these tensors, int64."""
        return np.array([self._number[name] for name in names], np.int64)

    def look(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each tensor the sum over its parts (uint64), and whether ranks differ in one of them."""
        values = values.view(np.uint64)
        once = values[self._by_part[self._begin[:-1]]]
        totals = np.zeros(len(self.boxes), np.uint64)
        np.add.at(totals, self._tensor, once)
        apart = np.zeros(len(self.boxes), bool)
        apart[self._tensor[self._part[values != once[self._part]]]] = True
        return totals, apart

    def told(self, name: str, values: np.ndarray, ranks: Sequence[Sequence[int]] | None) -> _Parts | None:
        """The values of each part of a tensor, each with the ranks that tell it."""
        if name not in self.boxes:
            return None
        found: _Parts = {}
        for box, number in self.boxes[name].items():
            held = found[box] = {}
            for entry in self._by_part[self._begin[number] : self._begin[number + 1]]:
                rank = int(self._rank[entry])
                held.setdefault(int(values[entry]), []).extend([rank] if ranks is None else ranks[rank])
        return found


_Parts = dict[Box, dict[int, list[int]]]
"""Of each part of one tensor the values that ranks tell, each with these ranks."""


def _difference(engine: _Parts | None, rollout: _Parts | None, shape: tuple[int, ...] | None) -> str:
    """How a tensor differs that does."""
    if shape is None:
        return "the trainer has no such tensor"
    for side, parts in (("trainer", engine), ("rollout", rollout)):
        if parts is None:
            return f"missing on the {side}"
        apart = [box for box, values in parts.items() if len(values) > 1]
        if apart:
            who = sorted(parts[apart[0]].values(), key=len)
            return (
                f"the {side}'s ranks hold different copies of {_place(apart[0])}: "
                f"{' other than '.join(map(_ranks, who))}"
            )
        fault = _cover(tuple(parts), shape)
        if fault:
            return f"the {side}'s parts {fault}"
    assert engine is not None
    assert rollout is not None
    # Where both sides are cut alike, the part can be told, and who holds it.
    wrong = [box for box in engine if box in rollout and engine[box].keys() != rollout[box].keys()]
    if not wrong or len(engine) == 1:
        return "other values"
    (held,) = rollout[wrong[0]].values()
    holders = {rank for values in rollout.values() for ranks in values.values() for rank in ranks}
    by = f", held by {_ranks(held)}" if len(holders) > 1 else ""
    return f"other values at {_place(wrong[0])}{by}"


def _ranks(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, sorted(numbers)[:RANKS_NAMED]))
    more = f" and {len(numbers) - RANKS_NAMED} more" if len(numbers) > RANKS_NAMED else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {named}{more}"


def _place(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


@lru_cache(maxsize=4096)  # many tensors are cut alike
def _cover(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> str:
    """What keeps boxes from covering a tensor exactly once; nothing when they do."""
    full = whole_box(shape)
    outside = [box for box in boxes if len(box) != len(full) or meet(box, full) != box]
    if outside:
        return f"{_place(outside[0])} is not within its shape {list(shape)}"
    if not _disjoint(list(boxes)):
        return "overlap"
    held, wanted = sum(map(volume, boxes)), math.prod(shape)
    return "" if held == wanted else f"are {held} of its {wanted} elements"


def _disjoint(boxes: list[Box]) -> bool:
    """Whether no two share an element. Boxes that are cut dim by dim are compared dim by dim, others in pairs."""
    if len(boxes) < 2:
        return True
    if not boxes[0]:
        return False
    by_first: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        by_first.setdefault(box[0], []).append(box[1:])
    spans = sorted(by_first)
    if any(one[1] > other[0] for one, other in itertools.pairwise(spans)):
        return all(meet(a, b) is None for a, b in itertools.combinations(boxes, 2))
    return all(_disjoint(inner) for inner in by_first.values())


def tensor_classes(names: Iterable[str]) -> dict[str, str]:
    """Of each tensor of a model its class: adapter, scale, mtp, router, expert, embedding, norm, bias or dense.

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
