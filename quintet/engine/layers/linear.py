"""megatron-core's linear layers, with a shorter and faster way for ranks on a CPU that share no matrix.

Core goes through three autograd functions a product, also in generation: on a CPU that is as long as a product of a decode step of a small
model takes. A product of `quintet.engine.product` goes through one, and in generation through none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from quintet.engine.product import by_onednn, packed, product


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


class _Direct(torch.nn.Module):
    weight: Tensor
    bias: Tensor | None
    skip_bias_add: bool
    tp_group: Any
    packed: Tensor | None = None

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the product, and the bias where it is yet to be added."""
        direct = not torch.is_grad_enabled() or by_onednn(input_)
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
