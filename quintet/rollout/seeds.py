"""The seed of each sample: a hash of its request's seed and its number."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.engine.weights.hashing import GOLDEN, mix, shift


def sample_seeds(seeds: Tensor, numbers: Tensor) -> Tensor:
    """Return the seed of sample `numbers` of each request's seed; int64, any shape."""
    return mix(seeds * GOLDEN + mix(numbers + 1))


def positive_seeds(seed: int, samples: int) -> list[int]:
    """Return seeds of all samples of a request, within 0 … 2⁶³ - 1, for an engine that takes no others."""
    return shift(sample_seeds(torch.tensor(seed), torch.arange(samples)), 1).tolist()
