"""KL divergence estimated from the log-probs of sampled tokens.

Estimators k1, k2, k3 of J. Schulman, "Approximating KL Divergence" (2020, joschu.net/blog/kl-approx.html), for tokens
sampled from the first policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp of more overflows float32 sums; the clamp also bounds the gradient of a token that has run away. k1 and k2 have no exponential.
LOG_RATIO_LIMIT = 20.0


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """Return KL(policy ‖ reference) at each token, for tokens sampled from the policy; nats.

    With d = ref_logprobs - logprobs: k1 = -d (unbiased, noisy, may be negative), k2 = d²/2 (biased, small variance),
    k3 = e^d - 1 - d (unbiased, never negative). As a loss term: k2's gradient is that KL's own,
    k3's is the gradient of KL(reference ‖ policy), k1's has expectation zero.

    Args:
        logprobs, ref_logprobs: [tokens]; gradients flow through both.
        estimator: "k1", "k2" or "k3".
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.expm1(d) - d
    raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")


def mismatch(rollout_logprobs: Tensor, logprobs: Tensor, mask: Tensor, threshold: float) -> dict[str, Tensor]:
    """Return how well the trainer's log-probs of sampled tokens agree with those the rollout policy sampled them with.

    Args:
        rollout_logprobs, logprobs, mask: [tokens]; the mask is 1 on sampled tokens.
        threshold: |difference| above which a token counts as over the threshold.

    Returns:
        Per-token quantities [tokens], 0 where the mask is 0, to be given to `Tally.add`: `rollout_kl_k1` and
        `rollout_kl_k3` (KL of rollout to trainer, nats), `rollout_logprob_gap` (|difference|, whose mean and
        maximum both tell), `rollout_log_ratio` (log of trainer / rollout, whose percentiles tell) and `rollout_over_threshold`
        (1 where the gap is above the threshold, or is no number).
    """
    on = mask > 0
    ours = torch.where(on, logprobs.detach(), 0.0)
    theirs = torch.where(on, rollout_logprobs, 0.0)
    gap = (theirs - ours).abs()
    return {
        "rollout_kl_k1": kl(theirs, ours, "k1"),
        "rollout_kl_k3": kl(theirs, ours, "k3"),
        "rollout_logprob_gap": gap,
        "rollout_log_ratio": ours - theirs,
        "rollout_over_threshold": (~(gap <= threshold)).float(),
    }
