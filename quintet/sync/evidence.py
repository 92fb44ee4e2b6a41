"""What the controller knows of weights by the digests that ranks tell, and which of them it has proved equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from quintet.sync.proof import Comparison, Difference, Heard
from quintet.sync.witness import Digest, Inventory, Statement

Pair = tuple[frozenset[Digest], frozenset[Digest]]
"""All that the trainer holds, and all that one copy of the rollout does. How many ranks hold the same is no matter."""


class Evidence:
    """Of the last sync, and no other: what it told is compared with nothing twice, and told once by ranks that hold the same."""

    def __init__(self) -> None:
        self._inventories: dict[bytes, Inventory] = {}
        self._values: dict[Digest, np.ndarray] = {}
        self._proved: set[Pair] = set()
        self._comparisons: dict[tuple[tuple[bytes, ...], tuple[bytes, ...]], Comparison] = {}

    def begin(self, told: Iterable[Digest]) -> None:
        """A sync after which ranks tell these digests: what others stand for is forgotten."""
        present = set(told)
        inventories = {one.inventory for one in present}
        self._values = {one: values for one, values in self._values.items() if one in present}
        self._inventories = {key: one for key, one in self._inventories.items() if key in inventories}
        self._proved = {pair for pair in self._proved if pair[0] | pair[1] <= present}
        self._comparisons = {
            key: one for key, one in self._comparisons.items() if {*key[0], *key[1]} <= inventories
        }

    @property
    def known(self) -> list[bytes]:
        """Digests of the inventories that need not be told again."""
        return list(self._inventories)

    def lacking(self, engine: Sequence[Digest], copies: Iterable[Sequence[Digest]]) -> set[Digest]:
        """Whose statements are needed to compare these copies with the trainer."""
        return {
            digest
            for copy in copies
            if (frozenset(engine), frozenset(copy)) not in self._proved
            for digest in (*engine, *copy)
            if digest not in self._values
        }

    def take(self, told: Mapping[Digest, Statement]) -> None:
        """Note what digests stand for."""
        for digest, statement in told.items():
            self._values[digest] = statement.values
            if statement.inventory is not None:
                self._inventories[digest.inventory] = statement.inventory

    def unreadable(self, copy: Iterable[Digest]) -> set[str]:
        """Tensors that ranks of a copy cannot read back."""
        return {name for one in copy for name in self._inventories[one.inventory].unreadable}

    def differences(self, engine: Sequence[Digest], copy: Sequence[Digest]) -> list[Difference]:
        """The tensors in which a copy differs from the trainer, digests rank by rank: see `compare`. What they stand for is
        known, or proved."""
        pair = frozenset(engine), frozenset(copy)
        if pair in self._proved:
            return []
        sides = _by_digest(engine), _by_digest(copy)
        heard = [Heard([self._values[one] for one in side], list(side.values())) for side in sides]
        found = self._comparison(*sides).differences(*heard)
        if not found:
            self._proved.add(pair)
        return found

    def _comparison(self, engine: Iterable[Digest], copy: Iterable[Digest]) -> Comparison:
        key = tuple(one.inventory for one in engine), tuple(one.inventory for one in copy)
        if key not in self._comparisons:
            held = [[self._inventories[one] for one in side] for side in key]
            shapes = {name: shape for one in held[0] for name, shape in one.shapes.items()}
            self._comparisons[key] = Comparison(held[0], held[1], shapes, self.unreadable(copy))
        return self._comparisons[key]


def _by_digest(ranks: Sequence[Digest]) -> dict[Digest, list[int]]:
    """The ranks that tell each digest."""
    found: dict[Digest, list[int]] = {}
    for rank, digest in enumerate(ranks):
        found.setdefault(digest, []).append(rank)
    return found
