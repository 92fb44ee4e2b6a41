"""The feed-forward part of a layer: megatron-core's modules around our SwiGLU, one pass over its data on GPU."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from quintet.engine.device import runs_fused


def swiglu(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(gate) · up, times a weight a row where given: [..., 2w] → [..., w] in the type of x.

    x: gate beside up along the last dim. weights: [..., 1]. (Shazeer 2020, https://arxiv.org/abs/2002.05202)
    """
    if runs_fused(x):
        from quintet.engine import swiglu_kernels

        rows = x.reshape(-1, x.shape[-1])
        out = swiglu_kernels.swiglu(rows, None if weights is None else weights.reshape(-1))
        return out.view(*x.shape[:-1], x.shape[-1] // 2)
    gate, up = x.chunk(2, -1)
    product = F.silu(gate) * up
    return product if weights is None else (product * weights).to(x.dtype)


class GatedMLP(MLP):
    """W2 (silu(G x) ⊙ U x), W1 = [G; U]. Without biases."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[T (/tp under SP), 1, hidden] → the same, and the projection's bias (None)."""
        hidden, _ = self.linear_fc1(hidden_states)
        out, bias = self.linear_fc2(swiglu(hidden))
        return out, bias


class GatedSharedExperts(SharedExpertMLP, GatedMLP):
    """Core's shared experts call their base's forward, which here is GatedMLP's."""
