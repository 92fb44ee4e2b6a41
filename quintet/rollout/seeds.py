"""The seed of each sample: a hash of its request's seed and its number."""

from __future__ import annotations

import torch

from quintet.engine.weights.hashing import GOLDEN, mix, shift


def sample_seeds(seed: int, samples: int) -> list[int]:
    """Return the seeds of all samples of a request of this seed: within 0 … 2⁶³ - 1, since some engines take no others."""
    numbers = torch.arange(1, samples + 1)
    return shift(mix(torch.tensor(seed) * GOLDEN + mix(numbers)), 1).tolist()
