"""Whether one policy answers the same questions better than another: a bootstrap over questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

RESAMPLES = 20_000
AT_ONCE = 1_000
"""Resamples drawn at once."""


class Gain(NamedTuple):
    """What the second of two policies gained: the mean over questions, the interval that holds 95% of resampled means, and the share
    of these that show no gain (one-sided p; no smaller than one of `RESAMPLES` + 1)."""

    mean: float
    low: float
    high: float
    p: float


def paired_bootstrap(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Gain:
    """Draw as many questions as there are, with repeats, `RESAMPLES` times, and return what `after` gained over `before` in them.

    before, after: how right each question was answered, 0 to 1, in the same order. Raises ValueError where they are not as many, or
    none.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"{len(before)} and {len(after)} questions are no pairs")
    gained = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed)
    means = torch.cat(
        [
            gained[torch.randint(len(gained), (AT_ONCE, len(gained)), generator=draw)].mean(1)
            for _ in range(RESAMPLES // AT_ONCE)
        ]
    )
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    none = int((means <= 1e-12).sum())  # sums of thirds that should be 0
    return Gain(float(gained.mean()), low, high, (1 + none) / (1 + RESAMPLES))
