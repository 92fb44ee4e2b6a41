"""Context parallelism's cut of a row: the one place that says which tokens a rank holds.

Every sequence is cut into 2·cp equal chunks; rank r holds chunks r and 2·cp - 1 - r. Under a causal mask early
chunks are cheap and late ones dear, so this zigzag gives every rank the same work (Llama 3, section 3.3.2,
https://arxiv.org/abs/2407.21783).
"""

from __future__ import annotations

from collections.abc import Sequence


def zigzag(cp: int, rank: int) -> tuple[int, int]:
    """Return the two chunks, of 2·cp, that a context-parallel rank holds of every sequence; the first lies earlier."""
    return rank, 2 * cp - 1 - rank


def held_ranges(lengths: Sequence[int], cp: int, rank: int) -> list[range]:
    """Return the row positions that a rank holds, in the order in which it holds them.

    lengths: of the row's sequences, each a multiple of 2·cp when cp > 1 (see `Alignment`).

    Raises ValueError for a length that cannot be cut.
    """
    ranges, begin = [], 0
    for n in lengths:
        if cp == 1:
            ranges.append(range(begin, begin + n))
        else:
            chunk, rest = divmod(n, 2 * cp)
            if rest:
                raise ValueError(f"a sequence of {n} tokens cannot be cut into {2 * cp} equal chunks")
            ranges += [range(begin + c * chunk, begin + (c + 1) * chunk) for c in zigzag(cp, rank)]
        begin += n
    return ranges
