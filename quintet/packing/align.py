"""Token alignment: the one place that knows what multiples a layout needs.

A packed micro-batch is a row of sequences. Each sequence is padded to `sequence` tokens so that context
parallelism can cut it into equal chunks; the row is padded to `total` tokens so that sequence parallelism
can cut it into equal slices. All padding is of tokens that carry no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True)
class Alignment:
    """Multiples in tokens of the whole (not yet CP-sliced) sequence, and of the whole row."""

    sequence: int = 1
    total: int = 1

    def padded(self, length: int) -> int:
        """Tokens one sequence of `length` tokens takes in a row."""
        return -(-length // self.sequence) * self.sequence

    def row(self, lengths: Sequence[int]) -> int:
        """Tokens a row of these sequences takes, its own padding included; never 0."""
        tokens = sum(self.padded(n) for n in lengths)
        return max(-(-tokens // self.total) * self.total, self.total)


def alignment(*, tp: int = 1, sp: bool = False, cp: int = 1) -> Alignment:
    """Alignment of a layout: 2·cp a sequence (zigzag chunks), tp·cp a row under sequence parallelism."""
    sequence = 2 * cp if cp > 1 else 1
    total = (tp if sp else 1) * cp
    return Alignment(sequence=sequence, total=lcm(sequence, total))
