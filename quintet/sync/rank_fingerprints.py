"""What a rank tells of its weights: once which parts it holds, and after each sync one vector with a fingerprint of each of them.

The parts stay the same from sync to sync, while values change. They are named by a digest, which comes with every vector, and come
themselves with the first one that is of them: values of one plan are never taken for another's. Ranks that hold the same parts have
the same digest, whatever the order they read their weights in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from pydantic import Base64Bytes

from quintet.engine.weights.fingerprint import Fingerprints
from quintet.models.mcore import Box, volume
from quintet.typed import Typed

Part = tuple[str, Box]
"""A tensor's name, and the box of it."""
DIGEST_BYTES = 16


@dataclass(frozen=True)
class RankFingerprints:
    """What one rank tells after a sync. index: digest of its `ShardIndex`. values: int64, of each part of that, in its order.
    parts: the index itself, in the words of `INDEX`, where it is another than the last time: the first to tell it is enough."""

    index: bytes
    values: bytes
    parts: bytes = field(default=b"", compare=False)


@dataclass(frozen=True)
class ShardIndex:
    """The parts that a rank tells fingerprints of, sorted, none of them empty.

    shapes: of the whole tensors, where the trainer tells. unreadable: tensors that a rollout cannot read back.
    """

    parts: tuple[Part, ...]
    shapes: Mapping[str, tuple[int, ...]]
    unreadable: tuple[str, ...]
    digest: Base64Bytes


INDEX: Typed[ShardIndex] = Typed(ShardIndex, "an index of parts of weights")


class RankIndexer:
    """The maker of one rank's `RankFingerprints`: it makes vectors of fingerprints, and keeps the index of the last one."""

    def __init__(self) -> None:
        self._seen: tuple[list[Part], dict[str, tuple[int, ...]], list[str]] | None = None
        self._order = np.zeros(0, np.int64)
        self.index = ShardIndex((), {}, (), b"")

    def tell(
        self,
        prints: Fingerprints,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        unreadable: Iterable[str] = (),
    ) -> RankFingerprints:
        """Return these fingerprints as a rank tells them. shapes, unreadable: as in `ShardIndex`."""
        seen, news = (list(prints), dict(shapes or {}), sorted(unreadable)), b""
        if seen != self._seen:  # once in a run, mostly: to look is a tenth of the work
            self._seen = seen
            held = sorted((part, at) for at, part in enumerate(seen[0]) if volume(part[1]))
            self._order = np.array([at for _, at in held], np.int64)
            parts = tuple(part for part, _ in held)
            digest = blake2b(repr((parts, seen[1:])).encode(), digest_size=DIGEST_BYTES).digest()
            self.index = ShardIndex(parts, seen[1], tuple(seen[2]), digest)
            news = INDEX.dump(self.index)
        values = np.fromiter(prints.values(), np.int64, len(prints))[self._order]
        return RankFingerprints(self.index.digest, values.tobytes(), news)
