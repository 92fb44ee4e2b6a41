"""What a rank tells of its weights: a digest of their fingerprints each time, and the fingerprints behind it where they are needed.

Which parts a rank holds, its inventory, stays the same from step to step, while the values change. So there is a digest of each.
Ranks that hold the same say the same, whatever the order they read their weights in; one of them is asked for the values, as
one array, and for the inventory once in a run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from quintet.engine.weights.fingerprint import Fingerprints
from quintet.models.mcore import Box, volume

Part = tuple[str, Box]
"""A tensor's name, and the box of it."""
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Inventory:
    """Which parts a rank holds, sorted, none of them empty.

    shapes: of the whole tensors, where the trainer tells. unreadable: tensors that a rollout cannot read back.
    """

    parts: tuple[Part, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()

    def digest(self) -> bytes:
        """The same for equal inventories, on any machine."""
        return _digest(repr((self.parts, tuple(self.shapes.items()), self.unreadable)).encode())


@dataclass(frozen=True)
class Digest:
    """Short for all that a rank holds: ranks with equal ones hold the same."""

    inventory: bytes
    values: bytes


@dataclass(frozen=True)
class Statement:
    """What a digest stands for. values: int64, of each part of the inventory; which is None where it was known."""

    values: np.ndarray
    inventory: Inventory | None


class Witness:
    """A rank's own: it tells digests, and keeps what the last one stands for."""

    def __init__(self) -> None:
        self._seen: tuple[list[Part], dict[str, tuple[int, ...]], list[str]] | None = None
        self._inventory, self._named = Inventory(()), b""
        self._order = self._values = np.zeros(0, np.int64)

    def digest(
        self,
        prints: Fingerprints,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        unreadable: Iterable[str] = (),
    ) -> Digest:
        """Of these fingerprints. shapes, unreadable: as in `Inventory`."""
        seen = (list(prints), dict(shapes or {}), list(unreadable))
        if seen != self._seen:  # once in a run, mostly: to look is a tenth of the work
            self._seen = seen
            self._inventory, self._order = inventory_of(*seen)
            self._named = self._inventory.digest()
        self._values = np.fromiter(prints.values(), np.int64, len(prints))[self._order]
        return Digest(self._named, _digest(self._values.tobytes()))

    def statement(self, known: Collection[bytes]) -> Statement:
        """What the last digest stands for. known: digests of inventories that need not be told."""
        return Statement(self._values, None if self._named in known else self._inventory)


def inventory_of(
    parts: Iterable[Part], shapes: Mapping[str, tuple[int, ...]], unreadable: Iterable[str]
) -> tuple[Inventory, np.ndarray]:
    """The inventory of a rank with these parts, and where each of the inventory's is among them (int64)."""
    places = sorted((part, at) for at, part in enumerate(parts) if volume(part[1]))
    order = np.fromiter((at for _, at in places), np.int64, len(places))
    whole = {name: tuple(shape) for name, shape in shapes.items()}
    return Inventory(tuple(part for part, _ in places), whole, tuple(sorted(unreadable))), order


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
