"""The packer: lengths in, micro-batches out.

Samples are spread over data-parallel ranks and micro-batches so that every micro-batch keeps a hard token
budget, every rank has the same count of micro-batches, and their costs are as even as greedy
longest-first placement makes them (Graham 1969: within 4/3 of the best). Cost is tokens plus a quadratic
term for attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from quintet.errors import UserError
from quintet.packing.align import Alignment

PLAIN = Alignment()


@dataclass(frozen=True)
class Plan:
    """`microbatches[dp_rank][k]` lists the indices of the samples in that rank's k-th micro-batch.

    Every rank has the same count of micro-batches; one may be empty where samples ran out.
    """

    microbatches: list[list[list[int]]]

    def samples_of(self, dp_rank: int) -> list[int]:
        """Indices of one rank's samples, in the order of its micro-batches."""
        return [i for row in self.microbatches[dp_rank] for i in row]

    def local(self, dp_rank: int) -> list[list[int]]:
        """The rank's micro-batches as positions in `samples_of(dp_rank)`."""
        rows, start = [], 0
        for row in self.microbatches[dp_rank]:
            rows.append(list(range(start, start + len(row))))
            start += len(row)
        return rows


def plan_microbatches(
    lengths: Sequence[int],
    *,
    dp: int,
    budget: int,
    alignment: Alignment = PLAIN,
    cp: int = 1,
    quadratic: float = 0.0,
) -> Plan:
    """Assign samples to ranks and micro-batches.

    lengths: tokens of each sample. dp: data-parallel ranks. budget: most tokens of a micro-batch on one
    rank, padding included. cp: context-parallel ranks that share a row. quadratic: cost of attention
    relative to the rest, per token of length (cost of a sample = n + quadratic * n^2).

    Raises UserError naming a sample that does not fit the budget on its own.
    """
    row_budget = budget * cp // alignment.total * alignment.total
    for i, n in enumerate(lengths):
        if alignment.row([n]) > row_budget:
            raise UserError(
                f"sample {i} has {n} tokens, {alignment.row([n]) // cp} on each rank with alignment: more than "
                f"engine.tokens_per_microbatch_per_rank={budget}. Raise the budget, shorten "
                f"rollout.max_response_tokens or data.max_prompt_tokens, or raise layout.cp"
            )
    cost = [n + quadratic * n * n for n in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-cost[i], i))
    ranks: list[list[int]] = [[] for _ in range(dp)]
    load = [0.0] * dp
    for i in order:
        r = min(range(dp), key=lambda r: (load[r], len(ranks[r]), r))
        ranks[r].append(i)
        load[r] += cost[i]

    count = max(1, *(_least_rows(rank, lengths, alignment, row_budget) for rank in ranks))
    while True:
        rows = [_fill(rank, lengths, cost, alignment, row_budget, count) for rank in ranks]
        if all(r is not None for r in rows):
            return Plan([[sorted(row) for row in r] for r in rows if r is not None])
        count += 1


def _least_rows(samples: list[int], lengths: Sequence[int], alignment: Alignment, row_budget: int) -> int:
    tokens = sum(alignment.padded(lengths[i]) for i in samples)
    return -(-tokens // row_budget)


def _fill(
    samples: list[int],
    lengths: Sequence[int],
    cost: list[float],
    alignment: Alignment,
    row_budget: int,
    count: int,
) -> list[list[int]] | None:
    """Longest first into the cheapest of `count` rows that has room; None when one finds no room."""
    rows: list[list[int]] = [[] for _ in range(count)]
    tokens, load = [0] * count, [0.0] * count
    for i in samples:
        n = alignment.padded(lengths[i])
        fits = [k for k in range(count) if tokens[k] + n <= row_budget]
        if not fits:
            return None
        k = min(fits, key=lambda k: (load[k], k))
        rows[k].append(i)
        tokens[k] += n
        load[k] += cost[i]
    return rows


def split_evenly(count: int, parts: int) -> list[range]:
    """`count` items in `parts` consecutive ranges whose sizes differ by at most one."""
    bounds = [count * k // parts for k in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]
