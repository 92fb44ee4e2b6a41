"""Sampling with noise keyed by (seed, position, token), so that output does not depend on batching."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.rollout.base import Sampling
from quintet.rollout.noise import draw_tokens


def draw(
    logits: Tensor, sampling: Sampling, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a token from each row of fp32 logits [n, vocab].

    positions: of the sequences' last tokens, which the drawn ones follow. Returns tokens int64 [n] and their log-probs, fp32 [n]
    each: under the sampling distribution, under the policy (the temperature applied, nothing cut), and under the raw
    model (temperature 1). Greedy draws have sampling log-prob 0, and the raw model for a policy.
    """
    raw = logits.log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        picked = raw.gather(1, tokens[:, None])[:, 0]
        return tokens, torch.zeros_like(picked), picked, picked
    plain = sampling.temperature == 1
    policy = raw if plain else (logits / sampling.temperature).log_softmax(-1)
    cut = keep_mask(policy, sampling)
    log_p = policy if cut is None else policy.masked_fill(~cut, float("-inf")).log_softmax(-1)
    tokens = draw_tokens(log_p, seeds, positions)
    of_policy = policy.gather(1, tokens[:, None])[:, 0]
    drawn = of_policy if cut is None else log_p.gather(1, tokens[:, None])[:, 0]
    return tokens, drawn, of_policy, of_policy if plain else raw.gather(1, tokens[:, None])[:, 0]


def keep_mask(log_p: Tensor, sampling: Sampling) -> Tensor | None:
    """Return which tokens survive top-k, top-p and min-p, bool [n, vocab]; None when all do.

    Each rule looks at what the ones before it left, renormalised; the most likely token always survives.
    """
    vocab = log_p.shape[1]
    if not 0 < sampling.top_k < vocab and sampling.top_p == 1 and sampling.min_p == 0:
        return None
    ordered, order = log_p.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if 0 < sampling.top_k < vocab:
        keep[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        p = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
        keep &= p.cumsum(-1) - p < sampling.top_p
    if sampling.min_p > 0:
        p = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
        keep &= p >= sampling.min_p * p[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(1, order, keep)
