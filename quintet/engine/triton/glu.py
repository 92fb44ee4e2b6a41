"""Triton kernels of `quintet.engine.layers.mlp.gated`, which defines what they compute. Arithmetic is fp32, rounded once."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.models.shape import Glu

BLOCK = 1024


def gated(x: Tensor, weights: Tensor | None, glu: Glu) -> Tensor:
    """Compute `quintet.engine.layers.mlp.gated` in one kernel. x: [T, 2w] with contiguous rows; weights: [T] or None. Returns
    [T, w]."""
    return _Gated.apply(x, weights, glu)


def _constants(glu: Glu, weights: Tensor | None) -> dict[str, Any]:
    """What kernels are compiled for."""
    return {
        "WEIGHTED": weights is not None,
        "ALPHA": glu.alpha,
        "OFFSET": glu.offset,
        "LIMITED": glu.limit is not None,
        "LIMIT": glu.limit or 0.0,
        "BLOCK": BLOCK,
    }


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, glu: Glu) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.constants = _constants(glu, weights)
        rows, width = len(x), x.shape[1] // 2
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        if out.numel():
            grid = (rows, triton.cdiv(width, BLOCK))
            _forward_kernel[grid](x, weights, out, width, x.stride(0), **ctx.constants)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        rows, width = len(x), x.shape[1] // 2
        weighted = weights is not None
        grad_x = torch.empty(rows, 2 * width, dtype=x.dtype, device=x.device)
        grad_weights = torch.zeros_like(weights) if weighted else None
        if grad_x.numel():
            _backward_kernel[(rows, 1 if weighted else triton.cdiv(width, BLOCK))](
                grad.contiguous(),
                x,
                weights,
                grad_x,
                grad_weights,
                width,
                x.stride(0),
                **ctx.constants,
            )
        return grad_x, grad_weights, None


@triton.jit
def _forward_kernel(
    x,
    weights,
    out,
    width,
    x_row,
    WEIGHTED: tl.constexpr,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMITED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < width
    gate = tl.load(x + row * x_row + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + width + lane, mask=inside, other=0.0).to(tl.float32)
    if LIMITED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    y = gate * tl.sigmoid(gate * ALPHA) * (up + OFFSET)
    if WEIGHTED:
        y = y * tl.load(weights + row).to(tl.float32)
    tl.store(out + row * width + lane, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad,
    x,
    weights,
    grad_x,
    grad_weights,
    width,
    x_row,
    WEIGHTED: tl.constexpr,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMITED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of a row, or a whole row where its weight's gradient is the sum over it."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    last = first + 1
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + row).to(tl.float32)
        last = width
    total = 0.0
    for start in range(first, last, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        inside = lane < width
        raw_gate = tl.load(x + row * x_row + lane, mask=inside, other=0.0).to(tl.float32)
        raw_up = tl.load(x + row * x_row + width + lane, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * width + lane, mask=inside, other=0.0).to(tl.float32)
        gate = raw_gate
        up = raw_up
        if LIMITED:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        up = up + OFFSET
        s = tl.sigmoid(gate * ALPHA)
        opened = gate * s
        if WEIGHTED:
            total += tl.sum(g * opened * up, 0)
        g = g * weight
        of_gate = g * up * s * (1.0 + gate * ALPHA * (1.0 - s))
        of_up = g * opened
        if LIMITED:
            of_gate = tl.where(raw_gate > LIMIT, 0.0, of_gate)
            of_up = tl.where(tl.abs(raw_up) > LIMIT, 0.0, of_up)
        target = grad_x + row * 2 * width + lane
        tl.store(target, of_gate.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(target + width, of_up.to(grad_x.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + row, total)
