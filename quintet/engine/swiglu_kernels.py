"""Triton kernels of `quintet.engine.mlp.swiglu`, which defines what they compute. Arithmetic is fp32, rounded once."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def swiglu(x: Tensor, weights: Tensor | None) -> Tensor:
    """x: [T, 2w] with contiguous rows; weights: [T] or None. Returns [T, w]."""
    out: Tensor = _SwiGlu.apply(x, weights)
    return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights)
        rows, width = len(x), x.shape[1] // 2
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        weighted = weights is not None
        if out.numel():
            grid = (rows, triton.cdiv(width, BLOCK))
            _forward_kernel[grid](x, weights, out, width, x.stride(0), WEIGHTED=weighted, BLOCK=BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
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
                WEIGHTED=weighted,
                BLOCK=BLOCK,
            )
        return grad_x, grad_weights


@triton.jit
def _forward_kernel(x, weights, out, width, x_row, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """One program a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < width
    gate = tl.load(x + row * x_row + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + width + lane, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        y = y * tl.load(weights + row).to(tl.float32)
    tl.store(out + row * width + lane, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad, x, weights, grad_x, grad_weights, width, x_row, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
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
        gate = tl.load(x + row * x_row + lane, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * x_row + width + lane, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * width + lane, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        silu = gate * s
        if WEIGHTED:
            total += tl.sum(g * silu * up, 0)
        g = g * weight
        target = grad_x + row * 2 * width + lane
        tl.store(target, (g * up * s * (1.0 + gate * (1.0 - s))).to(grad_x.dtype.element_ty), mask=inside)
        tl.store(target + width, (g * silu).to(grad_x.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + row, total)
