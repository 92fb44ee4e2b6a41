"""From values per token to numbers, with global counts, so that the split into micro-batches and ranks cannot matter.

Each way of aggregating is a weight a token: the loss is Σ weight · value over all tokens wherever they are, and the
weights can be made before a sample is cut over context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from quintet.algorithms.histogram import Histogram

SPREAD = frozenset({"rollout_log_ratio"})
"""Quantities whose percentiles are wanted: a tally keeps a histogram of each."""


def token_weights(
    mask: Tensor,
    sample_ids: Tensor,
    how: str | int,
    tokens_in_mini_batch: int,
    samples_in_mini_batch: int,
) -> Tensor:
    """Return the weight of each token's loss in the mini-batch's loss: [tokens] float32, 0 where the mask is 0.

    "token_mean": 1 / tokens_in_mini_batch. "sequence_mean": 1 / (trained tokens of its sample · samples_in_mini_batch).
    A number: 1 / (that number · samples_in_mini_batch), as if every sample had so many tokens (Dr. GRPO: Liu et al. 2025,
    https://arxiv.org/abs/2503.20783).

    Args:
        mask: 1 on trained tokens, [tokens].
        sample_ids: the sample of each token, 0-based, [tokens] int64; samples are whole here.
        tokens_in_mini_batch: trained tokens of the whole mini-batch, over all ranks and micro-batches.
        samples_in_mini_batch: its samples; one without a trained token adds nothing but counts if counted here.
    """
    on = mask > 0
    if how == "token_mean":
        return on.float() / max(tokens_in_mini_batch, 1)
    if how == "sequence_mean":
        tokens_in_sample = sample_ids.bincount(on.float()).clamp(min=1)[sample_ids]
        return on.float() / (tokens_in_sample * max(samples_in_mini_batch, 1))
    if isinstance(how, int):
        return on.float() / (how * max(samples_in_mini_batch, 1))
    raise ValueError(f"unknown aggregation {how!r}: token_mean, sequence_mean or a number of tokens")


class Tally:
    """The running sum, maximum and count of per-token quantities; tallies of micro-batches and ranks merge exactly.

    Of quantities in SPREAD it keeps a histogram besides. Holds tensors on their device, so adding does not wait for it;
    `means`, `maxima` and `quantiles` do.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        """Sum, maximum and count, by name."""
        self._spread: dict[str, Histogram] = {}

    def add(self, quantities: Mapping[str, Tensor], mask: Tensor) -> None:
        """Count the values [tokens] under a non-zero mask [tokens]."""
        on = mask > 0
        count = on.sum()
        for name, value in quantities.items():
            value = value.detach().double()
            if name in SPREAD:
                self._put_spread(name, Histogram(value, on))
            top = torch.where(on, value, -torch.inf).max() if len(value) else value.new_tensor(-torch.inf)
            self._put(name, torch.where(on, value, 0.0).sum(), top, count)

    def merge(self, others: Iterable[Tally]) -> Tally:
        """Add other tallies to this one, and return it."""
        for other in others:
            for name, found in other._found.items():
                self._put(name, *found)
            for name, histogram in other._spread.items():
                self._put_spread(name, histogram)
        return self

    def cpu(self) -> Tally:
        """Return this tally with its numbers on the CPU, to be sent elsewhere."""
        for name, (total, top, count) in self._found.items():
            self._found[name] = total.cpu(), top.cpu(), count.cpu()
        for spread in self._spread.values():
            spread.counts = spread.counts.cpu()
        return self

    def means(self) -> dict[str, float]:
        """Return the mean over the counted tokens by name; 0 where none was counted."""
        return {name: float(total) / max(int(count), 1) for name, (total, _, count) in self._found.items()}

    def maxima(self) -> dict[str, float]:
        """Return the largest counted value by name; 0 where none was counted."""
        return {name: float(top) if count else 0.0 for name, (_, top, count) in self._found.items()}

    def quantiles(self, name: str, shares: Iterable[float]) -> list[float]:
        """Return the values of a quantity in SPREAD that so large a share of the counted tokens does not exceed, to a percent of
        themselves: see `Histogram.quantiles`."""
        return self._spread.get(name, Histogram()).quantiles(shares)

    def _put_spread(self, name: str, histogram: Histogram) -> None:
        self._spread[name] = self._spread[name] + histogram if name in self._spread else histogram

    def _put(self, name: str, total: Tensor, top: Tensor, count: Tensor) -> None:
        if name in self._found:
            total_before, top_before, count_before = self._found[name]
            total, top, count = total_before + total, torch.maximum(top_before, top), count_before + count
        self._found[name] = total, top, count
