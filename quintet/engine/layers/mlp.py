"""The feed-forward part of a layer: megatron-core's modules around our gated activation, one pass over its data on GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from quintet.engine.device import runs_fused
from quintet.models.shape import SWIGLU, Glu

T = TypeVar("T")


def gated(x: Tensor, weights: Tensor | None = None, glu: Glu = SWIGLU) -> Tensor:
    """Return the gated activation of gate and up, times a weight a row where given: [..., 2w] → [..., w] in the type of x.

    x: gate beside up along the last dim. weights: [..., 1]. The default is SwiGLU, silu(gate) · up (Shazeer 2020,
    https://arxiv.org/abs/2002.05202); `Glu` tells the others.
    """
    if runs_fused(x):
        from quintet.engine.triton import glu as glu_kernels

        rows = x.reshape(-1, x.shape[-1])
        out = glu_kernels.gated(rows, None if weights is None else weights.reshape(-1), glu)
        return out.view(*x.shape[:-1], x.shape[-1] // 2)
    if glu != SWIGLU:
        return _Gated.apply(x, weights, glu)
    gate, up = x.chunk(2, -1)
    product = F.silu(gate) * up
    return product if weights is None else (product * weights).to(x.dtype)


class _Gated(torch.autograd.Function):
    """Any `Glu`, in fp32 or wider and rounded once, keeping nothing but its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, glu: Glu) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.glu = glu
        gate, up, opened = _parts(x, glu)
        product = (up + glu.offset) * gate * opened
        return (product if weights is None else product * weights).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        glu: Glu = ctx.glu
        gate, up, opened = _parts(x, glu)
        grad_weights = None
        if weights is not None:
            product = (up + glu.offset) * gate * opened
            grad_weights = (grad * product).sum(-1, keepdim=True).to(weights.dtype)
            grad = grad * weights
        grad_gate = grad * (up + glu.offset) * opened * (1 + glu.alpha * gate * (1 - opened))
        grad_up = grad * gate * opened
        if glu.limit is not None:
            raw_gate, raw_up = x.chunk(2, -1)
            grad_gate = grad_gate.masked_fill(raw_gate > glu.limit, 0.0)
            grad_up = grad_up.masked_fill(raw_up.abs() > glu.limit, 0.0)
        return torch.cat((grad_gate, grad_up), -1).to(x.dtype), grad_weights, None


def _parts(x: Tensor, glu: Glu) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up within their limits, and how far the gate is open."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    if glu.limit is not None:
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    return gate, up, torch.sigmoid(glu.alpha * gate)


def forgotten(
    again: bool, compute: Callable[..., T], *inputs: Tensor, fp8: Any = None
) -> tuple[T, Callable[[Tensor], None]]:
    """Compute something that what comes after it alone keeps. again: that is not to keep it, it is computed again in backward. fp8: None has
    core not ask TransformerEngine for its FP8 context, which it enters again otherwise.

    Returns it, and what is to be called with the output of what comes after.
    """
    if not (again and torch.is_grad_enabled()):
        return compute(*inputs), lambda out: None
    checkpoint = CheckpointWithoutOutput(fp8=fp8)
    return checkpoint.checkpoint(compute, *inputs), checkpoint.discard_output_and_register_recompute


def recomputes(config: TransformerConfig, module: str) -> bool:
    """Return whether selective recompute has a module."""
    return config.recompute_granularity == "selective" and module in config.recompute_modules


class GatedMLP(MLP):
    """A gated feed-forward part: W2 (silu(G x) ⊙ U x), W1 = [G; U]. Without biases."""

    recomputed = "mlp_act"
    """What selective recompute calls its activation function."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Transform hidden states [T (/tp under SP), 1, hidden] → the same, and the projection's bias (None)."""
        hidden, _ = self.linear_fc1(hidden_states)
        active, forget = forgotten(recomputes(self.config, self.recomputed), self._activate, hidden)
        out, bias = self.linear_fc2(active)
        forget(out)
        return out, bias

    def _activate(self, hidden: Tensor) -> Tensor:
        return gated(hidden)


class GatedSharedExperts(SharedExpertMLP, GatedMLP):
    """Core's shared experts call their base's forward, which here is GatedMLP's."""

    recomputed = ""
    """None of theirs alone: `shared_experts` is all of them."""
