"""Rotary embedding as one Triton kernel: each element is read once and written once.

What it computes is defined by `quintet.engine.layers.attention.rotate`; here the arithmetic is fp32 and rounded once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_kernel(
    x,
    token_stride,
    head_stride,
    cos,
    sin,
    sign,
    out,
    heads,
    half,
    width,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """One program a token. out: contiguous [tokens, heads, width]. What lies beyond the first 2 * half dims is copied, REST
    lanes wide."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (lane < half)
    c = tl.load(cos + token * half + lane, mask=lane < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + lane, mask=lane < half, other=0.0).to(tl.float32) * sign
    source = x + token * token_stride + head * head_stride + lane
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * heads + head) * width + lane
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
    if REST:
        beyond = 2 * half + tl.arange(0, REST)[None, :]
        kept = (head < heads) & (beyond < width)
        rest = tl.load(x + token * token_stride + head * head_stride + beyond, mask=kept)
        tl.store(out + (token * heads + head) * width + beyond, rest, mask=kept)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding: see `quintet.engine.layers.attention.rotate`. x: [T, 1, heads, d] of any strides; the result is
    contiguous."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """x turned by the angles, or back by them."""
    tokens, _, heads, width = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        half = cos.shape[-1]
        rest = width - 2 * half
        blocks = {
            "HEADS": triton.next_power_of_2(heads),
            "HALF": triton.next_power_of_2(half),
            "REST": triton.next_power_of_2(rest) if rest else 0,
        }
        _rotate_kernel[(tokens,)](
            x,
            x.stride(0),
            x.stride(2),
            cos.contiguous(),
            sin.contiguous(),
            sign,
            out,
            heads,
            half,
            width,
            **blocks,
        )
    return out
