"""Token alignment: the one place that knows what multiples a layout needs.

A packed micro-batch is a row of sequences. It is cut twice: context parallelism cuts every sequence into 2·cp equal
chunks and gives each cp rank two of them (zigzag), then sequence parallelism cuts what a cp rank has into tp equal
slices. So each sequence is padded to `sequence` tokens, and the row to `total` tokens. All padding is of tokens that
carry no loss.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quintet.recipe.schema import Engine, Layout

# Multiples of tokens that TransformerEngine wants of the slice each rank feeds to a linear layer, by FP8 recipe.
# One scale a tensor (tensorwise): cuBLAS wants leading dims of 16 bytes, and tokens are the leading dim of the weight
# gradient's operands; megatron-core's `get_fp8_align_size` says the same. blockwise: tiles of 128; a slice that is not
# whole tiles is gathered over tp in bf16 instead of FP8 (`Float8BlockQuantizer.is_quantizable`).
FP8_TOKENS = {"tensorwise": 16, "blockwise": 128}
ROW_WASTE = 0.125
"""Most padding of a row to the next of its sizes, over its tokens (`engine.row_buckets`)."""
ROW_SMALLEST = 0.125
"""The smallest of these sizes, over the largest."""


@dataclass(frozen=True)
class Alignment:
    """Multiples, in tokens, of the whole (not yet CP-sliced) sequence, and of the whole row.

    buckets: the sizes a row may have, ascending multiples of `total` (see `row_buckets`); empty allows any multiple.
    """

    sequence: int = 1
    total: int = 1
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.total % self.sequence or any(size % self.total for size in self.buckets):
            raise ValueError(f"{self}: total must be a multiple of sequence, and every bucket of total")

    def padded(self, length: int) -> int:
        """Return how many tokens one sequence of `length` tokens takes in a row."""
        return -(-length // self.sequence) * self.sequence

    def row(self, lengths: Sequence[int]) -> int:
        """Return how many tokens a row of these sequences takes, its own padding included; never 0. One of none is the smallest."""
        if not lengths:
            return self.total
        tokens = sum(self.padded(n) for n in lengths)
        tokens = max(-(-tokens // self.total) * self.total, self.total)
        at = bisect_left(self.buckets, tokens)
        return self.buckets[at] if at < len(self.buckets) else tokens

    def room(self, tokens: int) -> int:
        """Return how many tokens are in the largest row within `tokens`; 0 where none is. Padded sequences that sum to it fit."""
        if self.buckets:
            at = bisect_right(self.buckets, tokens)
            return self.buckets[at - 1] if at else 0
        return tokens // self.total * self.total


def alignment(*, tp: int = 1, sp: bool = False, cp: int = 1, fp8: str | None = None) -> Alignment:
    """Return the alignment of a layout: 2·cp a sequence (zigzag chunks), tp·cp a row under sequence parallelism.

    fp8: recipe key engine.fp8; with it the slice of every rank, after both cuts, is a multiple of `FP8_TOKENS[fp8]`.
    """
    sequence = 2 * cp if cp > 1 else 1
    slices = (tp if sp else 1) * cp
    # A multiple of both: every cp rank gets as many tokens, and they divide by tp.
    return Alignment(sequence, lcm(sequence, slices * (FP8_TOKENS[fp8] if fp8 else 1)))


def alignment_of(layout: Layout, cp: int, engine: Engine | None) -> Alignment:
    """Return the alignment of a row that `cp` ranks of a layout share, whatever its own `layout.cp`. engine: the recipe's section of the
    engine that computes it, None of a native rollout's, and no default: whoever plans a row or packs it says the same."""
    plain = alignment(tp=layout.tp, sp=layout.sp, cp=cp, fp8=engine.fp8 if engine else None)
    top = engine.tokens_per_microbatch_per_rank * cp if engine and engine.row_buckets else 0
    if top < plain.total:
        return plain
    sizes = row_buckets(top, total=plain.total, waste=ROW_WASTE, smallest=int(top * ROW_SMALLEST))
    return replace(plain, buckets=sizes)


@cache
def row_buckets(top: int, *, total: int = 1, waste: float = 0.125, smallest: int = 0) -> tuple[int, ...]:
    """Return the row sizes, so that kernels, graphs and allocators see few shapes: ascending multiples of `total`, up to `top`.

    The last size is the largest within `top`. Going down from it, each is 1 + waste times smaller, rounded down, until
    one is at most `smallest`. A row of t tokens, t a multiple of `total`, is therefore padded by at most waste · t,
    or to the first size, less than `smallest`, where it is no longer than that. There are about
    ln(top / smallest) / ln(1 + waste) sizes: 18 for an eighth and an eighth.

    Raises ValueError where no row fits `top`.
    """
    size = top // total * total
    if size <= 0:
        raise ValueError(f"no row of a multiple of {total} tokens fits {top}")
    sizes = [size]
    while size > max(smallest, total):
        size = max(min(int(size / (1 + waste) / total) * total, size - total), total)
        sizes.append(size)
    return tuple(reversed(sizes))
