"""Products with a weight: torch's, and on a CPU, in fp32, oneDNN's.

torch multiplies fp32 by MKL there, which takes old kernels on processors that are not Intel's, and packs the weights anew for every
product: oneDNN is twice as fast on AMD's, and three times for a few rows with weights that it has packed before. This module imports no
megatron-core, which a rollout's process does without.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

_ONEDNN = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
_PACKED_FOR_ROWS = 32
"""What oneDNN is told of the rows to come; what it packs for so many is as fast for fewer, and not slower for more."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ: [..., inputs] by [outputs, inputs], which `packed` may have made. Differentiable by both."""
    if not by_onednn(x):
        return x.new_zeros(*x.shape[:-1], len(weight)) if weight.is_mkldnn else torch.matmul(x, weight.t())
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Product.apply(x, weight)
    return _multiplied(x, weight)


def packed(weight: Tensor) -> Tensor:
    """Return a copy of the weight as oneDNN reads it fastest, for `product` without gradients; where that has no use, its own values."""
    values = weight.detach()
    if not by_onednn(values):
        return values
    return torch.ops.mkldnn._reorder_linear_weight(values, _PACKED_FOR_ROWS)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiplied(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x = _multiplied(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_x, None
        rows = (one.reshape(-1, one.shape[-1]) for one in (gradient, x))
        return of_x, _multiplied(*(one.t() for one in rows))


def by_onednn(x: Tensor) -> bool:
    """Return whether products of these values are oneDNN's."""
    return _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


def _multiplied(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
