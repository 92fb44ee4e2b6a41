"""Losses per token.

A loss maps the log-probs of a micro-batch's tokens, and the batch's fields at those tokens, to one loss value a token.
How they become one number is `aggregation`'s business, so a loss needs to know nothing of micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quintet.algorithms.kl import LOG_RATIO_LIMIT, kl


class TokenLoss(NamedTuple):
    """A loss of each token: values [tokens], 0 where the loss mask is 0."""

    per_token: Tensor
    """Loss of each token [tokens], carrying gradients to the log-probs."""
    stats: dict[str, Tensor]
    """Detached per-token quantities [tokens] to log, for `Tally.add` with the loss mask."""


BoundLoss = Callable[[Tensor, Mapping[str, Tensor]], TokenLoss]
"""(log-probs [tokens], per-token fields by name each [tokens]) → TokenLoss: one of the losses here with its settings fixed."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Return the clipped policy-gradient loss of each token.

    -min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A) with ratio = exp(logprobs - old_logprobs)
    (PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7; separate bounds: "clip-higher" of DAPO, Yu et al. 2025,
    arXiv:2503.14476, eq. 10).

    Args:
        logprobs, old_logprobs, advantages, mask: [tokens]; a sample's advantage is repeated over its tokens. Values
            under a zero mask are not looked at, whatever they are.

    Returns:
        The loss, and stats `clip_low` and `clip_high` (1 where that bound holds back the gradient) and `ratio`.
    """
    on = mask > 0
    # Masked before exp: 0 · inf under a zero mask would be nan, in the loss or in its gradient.
    log_ratio = torch.where(on, logprobs - old_logprobs, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages = torch.where(on, advantages, 0.0)
    ratio = log_ratio.exp()
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    held = ratio.detach()
    return TokenLoss(
        per_token,
        {
            "clip_low": ((held < 1 - clip_low) & (advantages < 0)).float(),
            "clip_high": ((held > 1 + clip_high) & (advantages > 0)).float(),
            "ratio": held,
        },
    )


def clipped_loss(
    logprobs: Tensor,
    fields: Mapping[str, Tensor],
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
) -> TokenLoss:
    """Return `policy_loss` plus, when `kl_coef` is above 0, that much of the KL to the reference policy.

    Reads the fields `old_logprobs`, `advantages`, `loss_mask`, and `ref_logprobs` with a KL; each [tokens]. Where these are there
    and the weight is 0, the KL is told (`ref_kl`), and no more.
    """
    mask = fields["loss_mask"]
    loss = policy_loss(logprobs, fields["old_logprobs"], fields["advantages"], mask, clip_low, clip_high)
    if kl_coef == 0.0 and "ref_logprobs" not in fields:
        return loss
    on = mask > 0
    divergence = kl(
        torch.where(on, logprobs, 0.0), torch.where(on, fields["ref_logprobs"], 0.0), kl_estimator
    )
    per_token = loss.per_token + kl_coef * divergence if kl_coef else loss.per_token
    return TokenLoss(per_token, {**loss.stats, "ref_kl": divergence.detach()})


def sft_loss(logprobs: Tensor, fields: Mapping[str, Tensor]) -> TokenLoss:
    """Return the negative log-likelihood of each trained token; reads the field `loss_mask` [tokens]."""
    per_token = -torch.where(fields["loss_mask"] > 0, logprobs, 0.0)
    return TokenLoss(per_token, {"nll": per_token.detach()})
