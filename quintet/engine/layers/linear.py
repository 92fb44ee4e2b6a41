"""megatron-core's linear layers, with a short way where no gradient is wanted and no rank shares the matrix.

Core goes through three autograd functions a product, also in generation. On a CPU that is as long as a product of a decode step of a small
model takes. What is computed is the same, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


class _Direct(torch.nn.Module):
    weight: Tensor
    bias: Tensor | None
    skip_bias_add: bool
    tp_group: Any

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the product, and the bias where it is yet to be added."""
        if args or kwargs or torch.is_grad_enabled() or self.tp_group.size() > 1:
            found: tuple[Tensor, Tensor | None] = super().forward(input_, *args, **kwargs)
            return found
        out = torch.matmul(input_, self.weight.t())
        if self.bias is None or self.skip_bias_add:
            return out, self.bias
        return out + self.bias, None


class ColumnLinear(_Direct, ColumnParallelLinear):
    """Core's linear layer whose outputs are cut over tp."""


class RowLinear(_Direct, RowParallelLinear):
    """Core's linear layer whose inputs are cut over tp."""
