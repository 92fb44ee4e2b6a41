"""The proof of a sync: what the rollout holds is what the engine holds, tensor by tensor.

Both sides tell fingerprints of the parts that each of their ranks holds (`quintet.engine.fingerprint`). Parts that several
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

from quintet.engine.fingerprint import Fingerprints
from quintet.errors import SyncMismatch
from quintet.models.lora import is_adapter
from quintet.models.mcore import Box, meet, volume, whole_box

NAMED = 10
"""Most tensors that a message names."""


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
    sides = [_by_tensor(engine), _by_tensor(rollout)]
    names = [*shapes, *(name for name in sides[1] if name not in shapes)]
    found = {}
    for name in names:
        if name not in unreadable or name in sides[1]:
            what = _difference(sides[0].get(name), sides[1].get(name), shapes.get(name))
            if what:
                found[name] = what
    if not found:
        return []
    kinds = tensor_classes(names)
    return [Difference(name, kinds[name], what) for name, what in found.items()]


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
    """What the trainer's ranks tell before a sync: fingerprints of what is exported and of the fp32 masters, rank by rank."""

    exported: Sequence[Fingerprints]
    masters: Sequence[int | None]


def stuck(before: Told, now: Told) -> str | None:
    """What to say when masters have changed since the last sync and no exported tensor has; None otherwise."""
    changed = [i for i, (a, b) in enumerate(zip(before.masters, now.masters, strict=True)) if a != b]
    if not changed or any(a != b for a, b in zip(before.exported, now.exported, strict=True)):
        return None
    return (
        f"the master weights of {len(changed)} of {len(now.masters)} ranks have changed since the last sync, and none of "
        "the tensors that the rollout gets has: it goes on with the old policy. Either steps are too small for the "
        "parameters' type (raise optimizer.lr, or use model.dtype=fp32), or updated masters do not reach the parameters"
    )


_Parts = dict[Box, list[int]]
"""The values that ranks tell of each part of one tensor."""


def _by_tensor(ranks: Sequence[Fingerprints]) -> dict[str, _Parts]:
    found: dict[str, _Parts] = {}
    for rank in ranks:
        for (name, box), value in rank.items():
            if volume(box):
                found.setdefault(name, {}).setdefault(box, []).append(value)
    return found


def _difference(engine: _Parts | None, rollout: _Parts | None, shape: tuple[int, ...] | None) -> str:
    """How a tensor differs; nothing when it does not."""
    if shape is None:
        return "the trainer has no such tensor"
    for side, parts in (("trainer", engine), ("rollout", rollout)):
        if parts is None:
            return f"missing on the {side}"
        apart = [box for box, values in parts.items() if len(set(values)) > 1]
        if apart:
            return f"the {side}'s ranks hold different copies of {_place(apart[0])}"
        fault = _cover(tuple(parts), shape)
        if fault:
            return f"the {side}'s parts {fault}"
    assert engine is not None
    assert rollout is not None
    if _total(engine) == _total(rollout):
        return ""
    # Where both sides are cut alike, the part can be told.
    wrong = [box for box in engine if box in rollout and engine[box][0] != rollout[box][0]]
    return f"other values at {_place(wrong[0])}" if wrong and len(engine) > 1 else "other values"


def _place(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _total(parts: _Parts) -> int:
    return sum(values[0] for values in parts.values()) % (1 << 64)


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
