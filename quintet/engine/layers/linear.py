"""megatron-core's linear layers, with a shorter and faster way for ranks on a CPU that share no matrix.

Core goes through three autograd functions a product, also in generation: on a CPU that is as long as a product of a decode step of a small
model takes. And torch multiplies fp32 by MKL there, which takes old kernels on processors that are not Intel's, and packs the weights
anew for every product: oneDNN is twice as fast on AMD's, and three times for a few rows with weights that it has packed before.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

_ONEDNN = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
_PACKED_FOR_ROWS = 32
"""What oneDNN is told of the rows to come; what it packs for so many is as fast for fewer, and not slower for more."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ: [..., inputs] by [outputs, inputs], which `packed` may have made. Differentiable by both."""
    if not _by_onednn(x):
        return x.new_zeros(*x.shape[:-1], len(weight)) if weight.is_mkldnn else torch.matmul(x, weight.t())
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Product.apply(x, weight)
    return _multiplied(x, weight)


def packed(weight: Tensor) -> Tensor:
    """Return a copy of the weight as oneDNN reads it fastest, for `product` without gradients; where that has no use, its own values."""
    values = weight.detach()
    if not _by_onednn(values):
        return values
    return torch.ops.mkldnn._reorder_linear_weight(values, _PACKED_FOR_ROWS)


@contextmanager
def packed_weights(model: torch.nn.Module) -> Iterator[None]:
    """Have the model's linear layers multiply by packed copies of their weights, which must not change meanwhile, without gradients."""
    layers = [one for one in model.modules() if isinstance(one, _Direct) and one.tp_group.size() == 1]
    try:
        for layer in layers:
            layer.packed = packed(layer.weight)
        yield
    finally:
        for layer in layers:
            layer.packed = None


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


def _by_onednn(x: Tensor) -> bool:
    return _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


def _multiplied(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class _Direct(torch.nn.Module):
    weight: Tensor
    bias: Tensor | None
    skip_bias_add: bool
    tp_group: Any
    packed: Tensor | None = None

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the product, and the bias where it is yet to be added."""
        direct = not torch.is_grad_enabled() or _by_onednn(input_)
        if args or kwargs or not direct or self.tp_group.size() > 1:
            return super().forward(input_, *args, **kwargs)
        out = product(input_, self.weight if self.packed is None else self.packed)
        if self.bias is None or self.skip_bias_add:
            return out, self.bias
        return out + self.bias, None


class ColumnLinear(_Direct, ColumnParallelLinear):
    """Core's linear layer whose outputs are cut over tp."""


class RowLinear(_Direct, RowParallelLinear):
    """Core's linear layer whose inputs are cut over tp."""
