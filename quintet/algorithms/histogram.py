"""Percentiles of values spread over ranks and micro-batches, from counts in bins that merge exactly.

Bins are as wide as their values are large (the idea of DDSketch, Masson et al. 2019, arxiv.org/abs/1908.10693), so a
percentile is right to one percent of itself, however the values lie, and memory is the same for ten values or a billion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

LEAST, MOST = 1e-8, 20.0
"""Magnitudes below LEAST count as 0, those above MOST as MOST."""
PRECISION = 0.01
"""Of a percentile, as a share of itself."""
_GROWTH = math.log((1 + PRECISION) / (1 - PRECISION))
_STEPS = math.ceil(math.log(MOST / LEAST) / _GROWTH)


class Histogram:
    """Counts of values by sign and magnitude: int64 [1 + 2 · steps + 1], the last of them those that are no numbers."""

    def __init__(self, values: Tensor | None = None, on: Tensor | None = None) -> None:
        """values, on: [n]; those where `on` is true are counted, on their device and without waiting for it."""
        device = None if values is None else values.device
        self.counts = torch.zeros(2 * _STEPS + 2, dtype=torch.int64, device=device)
        if values is not None:
            assert on is not None
            self.counts.index_add_(0, _bins(values.detach().double()), on.to(torch.int64))

    def __add__(self, other: Histogram) -> Histogram:
        """What both have counted."""
        sum_of_both = Histogram()
        sum_of_both.counts = self.counts + other.counts
        return sum_of_both

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """Return for each share q the value of rank ⌊q · (n - 1)⌋ from below, to PRECISION of itself. 0 where nothing was
        counted; NaN where one value was NaN, which has no rank."""
        counts = self.counts.cpu()
        total, shares = int(counts.sum()), list(shares)
        if total == 0:
            return [0.0] * len(shares)
        if counts[-1]:
            return [math.nan] * len(shares)
        up_to = counts.cumsum(0)
        ranks = torch.tensor([math.floor(q * (total - 1)) for q in shares])
        return [_middle(int(index)) for index in torch.searchsorted(up_to, ranks, right=True)]


def _bins(values: Tensor) -> Tensor:
    """The bin of each value: negative ones from the largest magnitude on, 0, positive ones; NaN last."""
    size = values.abs().clamp(max=MOST)
    steps = ((size / LEAST).log() / _GROWTH).ceil().clamp(1, _STEPS)
    index = torch.where(size < LEAST, 0.0, steps * values.sign()) + _STEPS
    return torch.where(values.isnan(), 2.0 * _STEPS + 1, index).to(torch.int64)


def _middle(index: int) -> float:
    """What stands for the values of a bin: as far from its lower as from its upper end, as a share."""
    step = index - _STEPS
    if step == 0:
        return 0.0
    return math.copysign(LEAST * math.exp(abs(step) * _GROWTH) * (1 - PRECISION), step)
