"""Groups of similar lengths, for kernels that want rectangles."""

from __future__ import annotations

from collections.abc import Sequence


def length_buckets(lengths: Sequence[int], *, overhead_tokens: int = 256) -> list[list[int]]:
    """Group indices so that padding each group to its longest costs little.

    A new group pays `overhead_tokens` (what one more kernel call costs, in padded tokens' worth of time);
    a longer rectangle pays its padding. Sorted by length, the best cut points follow from dynamic
    programming over the distinct lengths, which are few. Zero lengths are left out.
    """
    order = sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: (lengths[i], i))
    if not order:
        return []
    ends = [k for k in range(1, len(order)) if lengths[order[k]] != lengths[order[k - 1]]] + [len(order)]
    ends = _thin(ends, 64)
    best, cut = [0.0] + [0.0] * len(ends), [0] * (len(ends) + 1)
    starts = [0, *ends]
    for j in range(1, len(starts)):
        longest = lengths[order[starts[j] - 1]]
        costs = [best[i] + overhead_tokens + (starts[j] - starts[i]) * longest for i in range(j)]
        cut[j] = min(range(j), key=costs.__getitem__)
        best[j] = costs[cut[j]]
    groups, j = [], len(starts) - 1
    while j > 0:
        groups.append(order[starts[cut[j]] : starts[j]])
        j = cut[j]
    return groups[::-1]


def _thin(ends: list[int], most: int) -> list[int]:
    """At most `most` of the cut points, evenly spread, the last one always kept."""
    if len(ends) <= most:
        return ends
    return sorted({ends[(k + 1) * len(ends) // most - 1] for k in range(most)})
