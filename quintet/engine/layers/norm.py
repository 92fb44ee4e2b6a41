"""RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467) with megatron-core's constructor.

On GPU it is torch's fused kernel. On a CPU torch composes it of a dozen passes over memory; here it is three forward
and six backward, which a small model feels.

    y = x r w,  r = (mean x² + eps)^(-1/2);   dx = r (g w - x r² mean(g w x)),   dw = Σ g x r
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Norm over the last dim. Under SP each rank sees a slice of the tokens, so the weight's gradient is summed
    over tp: the attribute asks `finalize_model_grads` for it (which knows the norms of q and k by name, whose heads
    are cut over tp in any case)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return super().forward(x)
        if torch.is_grad_enabled():
            return _FewPasses.apply(x, self.weight, self.eps)
        return (x * _scale(x, self.eps)).mul_(self.weight)


def _scale(x: Tensor, eps: Any) -> Tensor:
    # The one reduction of torch that needs one pass.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _FewPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        weighted = grad * weight
        pull = torch.linalg.vecdot(weighted, x).unsqueeze(-1).mul_(scale.square()).div_(-width)
        grad_x = weighted.addcmul_(x, pull).mul_(scale)
        grad_weight = (grad * x).mul_(scale).reshape(-1, width).sum(0)
        return grad_x, grad_weight, None
