"""Fingerprints of two sides at once, for tests and benchmarks that have them all in one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from quintet.engine.weights.fingerprint import Fingerprints
from quintet.sync.proof import Comparison, Difference
from quintet.sync.rank_fingerprints import RankFingerprints, RankIndexer, ShardIndex


def compare(
    engine: Sequence[Fingerprints],
    rollout: Sequence[Fingerprints],
    shapes: Mapping[str, tuple[int, ...]],
    unreadable: Collection[str] = (),
) -> list[Difference]:
    """Return the tensors that differ, in the order of `shapes`, then those that only the rollout has.

    engine, rollout: of each rank. shapes: of every tensor that the engine sends. unreadable: tensors that the rollout
    cannot read back: nothing can be told of them here but whether they arrived right, where it has fingerprints of that.
    """
    sides: list[list[ShardIndex]] = []
    told: list[list[RankFingerprints]] = []
    for side, whole, names in ((engine, shapes, ()), (rollout, {}, unreadable)):
        ranks = [RankIndexer() for _ in side]
        told.append(
            [
                one.tell(prints, {} if at else whole, names)
                for at, (one, prints) in enumerate(zip(ranks, side, strict=True))
            ]
        )
        sides.append([one.index for one in ranks])
    return Comparison(*sides).differences(*told)
