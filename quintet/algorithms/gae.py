"""Advantages and returns from a value model: generalized advantage estimation, and whitening over the global batch.

Values follow the convention of the engine: at token t stands the value of the state in which t was chosen, so the state
after t is the one at the sample's next trained token. Tokens that are not trained (prompts, answers of tools) are no
actions: the recursion passes over them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sample_ids: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    A_t = Σ_l (gamma · lam)^l δ_{t+l} with δ_t = r_t + gamma · V_{t+1} - V_t, over the trained tokens of a sample.
    lam=1 gives discounted sums of rewards less the value, lam=0 the one-step error δ.

    Args:
        rewards: of each token, [tokens]; see `final_rewards` for one score a sample.
        values: of the state each token was chosen in, [tokens].
        mask: 1 on trained tokens, [tokens]. What stands elsewhere is not looked at.
        sample_ids: the sample of each token, 0-based, [tokens] int64, samples one after another.
        gamma, lam: discount of a step, and of estimates one step longer. The state after the last trained token is worth 0, also of a
            sample that was cut off.

    Returns:
        advantages and returns (advantages + values: the value model's targets), [tokens] fp32 each, 0 where the mask
        is 0. Neither carries gradients.

    Raises:
        ValueError: tokens of a sample are apart.
    """
    on = (mask > 0).nonzero()[:, 0]
    advantages, returns = (torch.zeros(mask.shape, device=mask.device) for _ in range(2))
    if len(on) == 0:
        return advantages, returns
    reward, value, sample = rewards.detach()[on].float(), values.detach()[on].float(), sample_ids[on]
    left = _tokens_after(sample)
    after = torch.zeros_like(value)
    after[:-1] = value[1:]
    total = reward + gamma * torch.where(left > 0, after, 0.0) - value

    # A_t sums δ over a window that doubles: t's window of `step` terms and the next one, discounted, make 2 · step.
    step, longest = 1, int(left.max())
    while step <= longest:
        further = torch.where(left[:-step] >= step, total[step:], 0.0)
        total[:-step].add_(further, alpha=(gamma * lam) ** step)
        step *= 2
    advantages[on] = total
    returns[on] = total + value
    return advantages, returns


def _tokens_after(sample: Tensor) -> Tensor:
    """How many tokens of its sample follow each token: [tokens] int64."""
    change = sample.diff()
    if bool((change < 0).any()):
        raise ValueError("sample_ids must not descend: each sample's tokens stand together")
    at = torch.arange(len(sample), device=sample.device)
    ends = torch.cat([change.nonzero()[:, 0], at[-1:]])
    counts = ends.diff(prepend=ends.new_full((1,), -1))
    return ends.repeat_interleave(counts) - at


def final_rewards(scores: Tensor, mask: Tensor, sample_ids: Tensor) -> Tensor:
    """Return rewards [tokens] fp32 that are 0 but for each sample's score on its last trained token.

    Args:
        scores: one a sample, [samples]. mask, sample_ids: as in `gae`. A sample without a trained token has nothing
            that could be rewarded.
    """
    on = (mask > 0).nonzero()[:, 0]
    rewards = torch.zeros(mask.shape, device=mask.device)
    if len(on):
        last = on[_tokens_after(sample_ids[on]) == 0]
        rewards[last] = scores.float()[sample_ids[last]]
    return rewards


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of `values` under the mask, [3] float64: parts of a batch add up to the whole's."""
    on = mask > 0
    v = torch.where(on, values.detach(), 0.0).double()
    return torch.stack([on.sum().double(), v.sum(), v.square().sum()])


def whiten(values: Tensor, mask: Tensor, moments: Tensor, eps: float = 1e-8) -> Tensor:
    """Return (values - mean) / sqrt(variance + eps) under the mask, 0 elsewhere: [tokens] fp32.

    Args:
        values, mask: [tokens].
        moments: of the whole batch over all ranks and micro-batches (see `moments`), [3]; so the result does not
            depend on how it was split. The variance is the unbiased one, and 0 for fewer than two tokens.
    """
    count, total, squares = moments.double().unbind()
    mean = total / count.clamp(min=1)
    variance = ((squares - total * mean) / (count - 1).clamp(min=1)).clamp(min=0)
    centered = values.double() - mean
    return torch.where(mask > 0, centered * (variance + eps).rsqrt(), 0.0).float()
