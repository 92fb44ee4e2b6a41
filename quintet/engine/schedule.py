"""Learning rate by step: linear warm-up, then constant, cosine, or WSD (warm-up, stable, decay)."""

from __future__ import annotations

import math

from quintet.recipe.schema import Optimizer


def learning_rate(step: int, total_steps: int, recipe: Optimizer) -> float:
    """Return the learning rate of the optimizer step number `step` (counted from 1) of `total_steps`.

    Warm-up rises linearly and reaches lr at step `warmup_steps`; the first step never has rate 0. The minimum is
    reached at the end of the decay. WSD decays linearly (Hu et al. 2024, https://arxiv.org/abs/2404.06395).
    """
    if step <= recipe.warmup_steps:
        return recipe.lr * step / recipe.warmup_steps
    low = recipe.lr * recipe.min_lr_ratio
    if recipe.schedule == "constant":
        return recipe.lr
    if recipe.schedule == "cosine":
        span = recipe.decay_steps or max(total_steps - recipe.warmup_steps, 1)
        done = min((step - recipe.warmup_steps) / span, 1.0)
        return low + (recipe.lr - low) * 0.5 * (1 + math.cos(math.pi * done))
    span = recipe.decay_steps or max(total_steps // 5, 1)
    done = min(max(step - (total_steps - span), 0) / span, 1.0)
    return recipe.lr + (low - recipe.lr) * done
