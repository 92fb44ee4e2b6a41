"""What the proof of a sync costs the controller of a large run, on made-up fingerprints.

    python -m benchmarks.proof [--copies 16] [--rounds 5] [--out FILE]

Qwen3-30B-A3B, trained on 64 ranks (tp 2, pp 2, ep 8: there are 16 shares, each on four ranks), generated with by copies on four
devices that one process speaks for. Every rank's fingerprints are made up. Metrics: seconds from what ranks have sent, as bytes, to
the controller's verdict; mib, what they send. Cases: the first proof of a run, in which every rank also tells which parts it holds
and the controller reads those of one of each kind, and the next, which is of values alone. The baseline of each is that every rank sends all its fingerprints with
their parts, and they are compared, those of copies that are the same once.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.compare import compare
from benchmarks.engine_work import MODELS
from benchmarks.options import positive_int
from benchmarks.records import record, write_records
from quintet.engine.weights.fingerprint import Fingerprints
from quintet.models import ModelShape, table_of
from quintet.models.mcore import Box, volume, whole_box
from quintet.sync.proof import Comparison
from quintet.sync.rank_fingerprints import INDEX, RankFingerprints, RankIndexer

RANKS, TP, PP, EP, DEVICES = 64, 2, 2, 8, 4
MIB = 2**20


def tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Of the whole model."""
    table = table_of(shape)
    return {name: full for weight in table for name, full in weight.tensors}


def share(name: str, full: tuple[int, ...], rank: int, layers: int) -> Box | None:
    """What a rank of the trainer holds of a tensor."""
    words = name.split(".")
    stage = int(words[2]) * PP // layers if words[1] == "layers" else PP - 1 if "embed" not in name else 0
    tp, pp, ep = rank % TP, rank // (RANKS // PP), rank % EP
    if stage != pp:
        return None
    if "experts" in words:
        return whole_box(full) if int(words[words.index("experts") + 1]) % EP == ep else None
    return part(full, tp, TP)


def part(full: tuple[int, ...], at: int, parts: int) -> Box:
    """A matrix is cut by rows, anything else is whole."""
    if len(full) == 1:
        return whole_box(full)
    step = full[0] // parts
    return ((at * step, (at + 1) * step), *whole_box(full)[1:])


def value(name: str, box: Box, step: int) -> int:
    """Made up, so that parts add up over any cutting."""
    return volume(box) * (zlib.crc32(name.encode()) + step)


class Side:
    """Ranks that tell what they hold."""

    def __init__(self, held: list[list[tuple[str, Box]]], shapes: list[dict[str, tuple[int, ...]]]) -> None:
        self._held, self._shapes = held, shapes
        self.indexers = [RankIndexer() for _ in held]
        self.prints: list[Fingerprints] = []

    def tell(self, step: int) -> list[RankFingerprints]:
        """After a step."""
        self.prints = [{one: value(*one, step) for one in rank} for rank in self._held]
        each = zip(self.indexers, self.prints, self._shapes, strict=True)
        return [one.tell(prints, shapes) for one, prints, shapes in each]


class Run:
    """One made-up run. copies: of the rollout."""

    def __init__(self, shape: ModelShape, copies: int) -> None:
        self.shapes = tensors(shape)
        trained = [
            {
                name: box
                for name, full in self.shapes.items()
                if (box := share(name, full, rank, shape.layers))
            }
            for rank in range(RANKS)
        ]
        shapes = [{name: self.shapes[name] for name in rank} for rank in trained]
        self.trainer = Side([list(rank.items()) for rank in trained], shapes)
        boxes = {
            name: sorted({part(full, at, DEVICES) for at in range(DEVICES)})
            for name, full in self.shapes.items()
        }
        of_copy = [(name, box) for name, cut in boxes.items() for box in cut]
        self.rollout = Side([of_copy] * copies, [{}] * copies)
        self._comparison: Comparison | None = None

    def prove(self, step: int) -> tuple[float, int]:
        """Seconds and bytes of a proof."""
        sent = pickle.dumps((self.trainer.tell(step), self.rollout.tell(step)))
        began = time.perf_counter()
        engine, copies = pickle.loads(sent)
        if self._comparison is None:
            parts = {one.index: one.parts for one in (*engine, copies[0])}
            known = {digest: INDEX.load(told, "a rank") for digest, told in parts.items()}
            self._comparison = Comparison([known[one.index] for one in engine], [known[copies[0].index]])
        assert all(one == copies[0] for one in copies)
        assert not self._comparison.differences(engine, copies[:1])
        return time.perf_counter() - began, len(sent)

    def compare_all(self) -> tuple[float, int]:
        """The same of all that every rank holds."""
        sent = [pickle.dumps(prints) for prints in (*self.trainer.prints, *self.rollout.prints)]
        began = time.perf_counter()
        prints = list(map(pickle.loads, sent))
        trained, copies = prints[:RANKS], prints[RANKS:]
        assert not compare(trained, copies[:1], self.shapes)
        assert all(one == copies[0] for one in copies)
        return time.perf_counter() - began, sum(map(len, sent))


def measure(run: Run, rounds: int) -> Iterator[tuple[str, tuple[float, float], tuple[float, float]]]:
    """By case: seconds and MiB, and those of comparing all."""

    def median(call: Callable[[], tuple[float, int]]) -> tuple[float, float]:
        found = [call() for _ in range(rounds)]
        return statistics.median(s for s, _ in found), found[0][1] / MIB

    seconds, nbytes = run.prove(0)
    plain = median(run.compare_all)
    yield "first", (seconds, nbytes / MIB), plain
    steps = iter(range(1, rounds + 1))
    yield "next", median(lambda: run.prove(next(steps))), plain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--copies", type=positive_int, default=16, help="of the rollout (16)")
    parser.add_argument("--rounds", type=positive_int, default=5, help="the median of so many is told (5)")
    parser.add_argument("--out", type=Path, help="write benchmark records to this file")
    arguments = parser.parse_args()
    run = Run(MODELS["qwen3-30b-a3b"].shape, arguments.copies)
    records: list[dict[str, Any]] = []
    for case, told, plain in measure(run, arguments.rounds):
        print(
            f"{case}: {told[0]:.4f} s, {told[1]:.2f} MiB (all compared: {plain[0]:.2f} s, {plain[1]:.1f} MiB)"
        )
        name = f"qwen3-30b-a3b/64-ranks-{arguments.copies}-copies/{case}"
        records.append(record("proof", name, "seconds", told[0], "s", baseline=plain[0]))
        records.append(record("proof", name, "mib", told[1], "MiB", baseline=plain[1]))
    if arguments.out:
        write_records(arguments.out, records)


if __name__ == "__main__":
    main()
