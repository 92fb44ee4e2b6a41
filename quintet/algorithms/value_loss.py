"""The value model's loss per token, and how much of the returns its values explain.

It has the form of the policy losses, with values in the place of log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quintet.algorithms.policy_loss import TokenLoss


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> TokenLoss:
    """Return the clipped squared error of each token's value.

    max((V - R)², (V_old + clip(V - V_old, -clip, clip) - R)²) / 2: a value that has moved away from the old one by more
    than `clip`, towards its return, gets no gradient (the value clipping of PPO's code; Engstrom et al. 2020,
    "Implementation matters in deep policy gradients", arXiv:2005.12729, section 3; the half is that code's).

    Args:
        values, old_values, returns, mask: [tokens]. What stands under a zero mask is not looked at, whatever it is.
        clip: farthest that counts, in units of the return; None leaves the squared error alone.

    Returns:
        The loss, and stats: `value_clip` (1 where clipping holds back the gradient), and what `explained_variance`
        needs: `value_error` (R - V), `value_error_squared`, `returns`, `returns_squared`.
    """
    on = mask > 0
    # Masked first: 0 · nan under a zero mask would be nan, in the loss or in its gradient.
    values = torch.where(on, values, 0.0)
    old_values, returns = torch.where(on, old_values, 0.0), torch.where(on, returns, 0.0)
    squared = (values - returns).square()
    held = torch.zeros_like(on)
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        clipped = (near - returns).square()
        held = ((values - old_values).abs() > clip) & (clipped > squared)
        squared = torch.maximum(squared, clipped)
    error = returns - values.detach()
    return TokenLoss(
        squared / 2,
        {
            "value_clip": held.float(),
            "value_error": error,
            "value_error_squared": error.square(),
            "returns": returns,
            "returns_squared": returns.square(),
        },
    )


def value_loss_of_fields(values: Tensor, fields: Mapping[str, Tensor], *, clip: float | None) -> TokenLoss:
    """Return `value_loss` on the fields `old_values`, `returns`, `loss_mask`; each [tokens]."""
    return value_loss(values, fields["old_values"], fields["returns"], fields["loss_mask"], clip)


def explained_variance(means: Mapping[str, float]) -> float:
    """Return 1 - Var(R - V) / Var(R): 1 for perfect values, 0 for ones no better than a constant, below for worse.

    Args:
        means: of the stats of `value_loss` over all tokens that count, as from `Tally.means`.

    Returns:
        The share; 0 where all returns are the same, and there is nothing to explain.
    """
    variance = means["returns_squared"] - means["returns"] ** 2
    unexplained = means["value_error_squared"] - means["value_error"] ** 2
    # A variance within the rounding of its two terms is none.
    return 1 - unexplained / variance if variance > 1e-6 * means["returns_squared"] else 0.0
