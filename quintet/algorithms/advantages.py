"""Advantages from rewards: how much better a sample did than the other samples of its prompt, or a token than was expected.

A way to advantages is a pure function of what a rank holds and of the rewards of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.algorithms.gae import final_rewards, gae, moments, whiten
from quintet.algorithms.kl import kl


def grpo_advantages(
    rewards: Tensor, group_ids: Tensor, normalize_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Return group-relative advantages (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1).

    A = (r - mean of the group) / (std of the group + eps); without `normalize_by_std` only the mean is taken off
    (Liu et al. 2025, "Understanding R1-Zero-like training", arXiv:2503.20783). std is the unbiased one.

    Args:
        rewards: one a sample, [samples].
        group_ids: equal for the samples of one prompt, in any order, [samples] integer.

    Returns:
        Advantages [samples], float32. Exactly 0 in a group of one sample, and in a group of equal rewards.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be [samples]"
        )
    r = rewards.float().double()  # sums of equal ones round nothing: their mean is the reward itself
    _, group = group_ids.unique(return_inverse=True)
    groups = int(group.max()) + 1 if len(group) else 0
    count = r.new_zeros(groups).index_add_(0, group, torch.ones_like(r))
    mean = r.new_zeros(groups).index_add_(0, group, r) / count
    centered = r - mean[group]
    if normalize_by_std:
        variance = r.new_zeros(groups).index_add_(0, group, centered**2) / (count - 1).clamp(min=1)
        centered = centered / (variance.sqrt()[group] + eps)
    return centered.float()


@dataclass(frozen=True)
class Scored:
    """The rewards of a whole batch: one a sample [samples], and the group of each [samples] int64."""

    rewards: Tensor
    groups: Tensor


AdvantageFunction = Callable[..., dict[str, Tensor]]
"""(fields by name, each flat over this rank's tokens [tokens]; the sample of each token, 0-based [tokens]; the numbers of these
samples in the batch [samples]; `Scored`; a function that sums a tensor over the ranks with other samples) → fields: per token [tokens],
or per sample [samples]."""


@dataclass(frozen=True)
class Advantages:
    """A way from rewards to advantages: one of the functions here with its settings fixed. Pickles.

    reads: fields per token that it needs besides loss_mask. writes: what it makes; per_token: which of that is per token.
    """

    make: AdvantageFunction
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ("advantages",)
    per_token: tuple[str, ...] = ()


def group_advantages(
    fields: Mapping[str, Tensor],
    sample_ids: Tensor,
    numbers: Tensor,
    scored: Scored,
    total: Callable[[Tensor], Tensor],
    *,
    normalize_by_std: bool,
) -> dict[str, Tensor]:
    """Return `grpo_advantages` of a batch, one a sample; a group's samples may be on any ranks, so that all of them are compared
    here."""
    return {"advantages": grpo_advantages(scored.rewards, scored.groups, normalize_by_std)[numbers]}


def value_advantages(
    fields: Mapping[str, Tensor],
    sample_ids: Tensor,
    numbers: Tensor,
    scored: Scored,
    total: Callable[[Tensor], Tensor],
    *,
    gamma: float,
    lam: float,
    kl_coef: float = 0.0,
    kl_estimator: str = "k1",
) -> dict[str, Tensor]:
    """Return generalized advantage estimation from the field `old_values`, whitened over the whole batch; and `returns`.

    A sample's reward stands on its last trained token. kl_coef: so much of the KL of the old to the reference policy is taken
    off each token's reward (fields `old_logprobs`, `ref_logprobs`; Ouyang et al. 2022, arXiv:2203.02155, eq. 2).
    """
    mask = fields["loss_mask"]
    rewards = final_rewards(scored.rewards[numbers], mask, sample_ids)
    if kl_coef:
        rewards = rewards - kl_coef * kl(fields["old_logprobs"], fields["ref_logprobs"], kl_estimator)
    advantages, returns = gae(rewards, fields["old_values"], mask, sample_ids, gamma, lam)
    return {"advantages": whiten(advantages, mask, total(moments(advantages, mask))), "returns": returns}
