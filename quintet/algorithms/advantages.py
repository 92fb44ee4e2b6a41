"""Advantages from rewards: how much better a sample did than the other samples of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo_advantages(
    rewards: Tensor, group_ids: Tensor, normalize_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1).

    A = (r - mean of the group) / (std of the group + eps); without `normalize_by_std` only the mean is taken off
    (Liu et al. 2025, "Understanding R1-Zero-like training", arXiv:2503.20783). std is the unbiased one.

    Args:
        rewards: one a sample, [samples].
        group_ids: equal for the samples of one prompt, in any order, [samples] integer.

    Returns:
        Advantages [samples], float32. Exactly 0 in a group of one sample, and in a group of equal rewards,
        where the mean's rounding error would otherwise be blown up to ±1.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be [samples]"
        )
    r = rewards.double()
    _, group = group_ids.unique(return_inverse=True)
    groups = int(group.max()) + 1 if len(group) else 0
    count = r.new_zeros(groups).index_add_(0, group, torch.ones_like(r))
    mean = r.new_zeros(groups).index_add_(0, group, r) / count
    centered = r - mean[group]
    low = r.new_full((groups,), float("inf")).scatter_reduce_(0, group, r, "amin")
    high = r.new_full((groups,), float("-inf")).scatter_reduce_(0, group, r, "amax")
    if normalize_by_std:
        variance = r.new_zeros(groups).index_add_(0, group, centered**2) / (count - 1).clamp(min=1)
        centered = centered / (variance.sqrt()[group] + eps)
    return torch.where((low == high)[group], 0.0, centered).float()
