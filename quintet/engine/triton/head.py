"""Triton kernels of the LM head: logits are read once forward, and read and overwritten once backward.

What each writes is defined in `quintet.engine.head`, whose plain path computes the same. A kernel's arithmetic is fp32,
its exponentials one a logit: two would take longer than reading the logits does.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LSE_BLOCK = 8192
WARPS = 8


@triton.jit
def _statistics_kernel(
    logits, stride, targets, out, out_stride, valid, inverse_temperature, BLOCK: tl.constexpr
):
    """One program a token. out: [4, tokens]. Sums stay one a lane until the end; the maximum is one a program."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lane = tl.arange(0, BLOCK)
    top = -1e30
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, valid, BLOCK):
        inside = start + lane < valid
        z = tl.load(logits + start + lane, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        z = tl.where(inside, z, -1e30)
        higher = tl.maximum(top, tl.max(z, 0))
        rescale = tl.exp(top - higher)
        shifted = z - higher
        weight = tl.exp(shifted)
        moment = rescale * (moment + (top - higher) * total) + weight * shifted
        total = rescale * total + weight
        top = higher
    target = tl.load(targets + row)
    here = (target >= 0) & (target < valid)
    at_target = tl.load(logits + target, mask=here, other=0.0).to(tl.float32) * inverse_temperature
    tl.store(out + row, top)
    tl.store(out + out_stride + row, tl.sum(total, 0))
    tl.store(out + 2 * out_stride + row, tl.sum(moment, 0))
    tl.store(out + 3 * out_stride + row, at_target)


@triton.jit
def _gradient_kernel(
    logits,
    stride,
    targets,
    lse,
    entropy,
    grad_log_prob,
    grad_entropy,
    size,
    valid,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + column
    z = tl.load(at, mask=column < valid, other=0.0).to(tl.float32) * inverse_temperature
    log_p = z - tl.load(lse + row)
    outer = tl.load(grad_log_prob + row)
    factor = outer
    if WITH_ENTROPY:
        factor = outer + tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    grad = tl.where(column == tl.load(targets + row), outer, 0.0) - tl.exp(log_p) * factor
    grad = tl.where(column < valid, grad * inverse_temperature, 0.0)
    tl.store(at, grad.to(logits.dtype.element_ty), mask=column < size)


@triton.jit
def _lse_kernel(logits, stride, lse, blocks, valid, BLOCK: tl.constexpr):
    """One program a token and BLOCK columns. lse: [tokens, blocks]."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * stride + column, mask=column < valid, other=-float("inf")).to(tl.float32)
    top = tl.maximum(tl.max(z, 0), -1e30)
    tl.store(lse + row * blocks + tl.program_id(0), top + tl.log(tl.sum(tl.exp(z - top), 0)))


@triton.jit
def _log_prob_kernel(logits, stride, tokens, lse, out, blocks, BLOCKS: tl.constexpr):
    """One program a token. BLOCKS: `blocks` or more, a power of two."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCKS)
    parts = tl.load(lse + row * blocks + lane, mask=lane < blocks, other=-float("inf"))
    top = tl.max(parts, 0)
    at_token = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(out + row, at_token - top - tl.log(tl.sum(tl.exp(parts - top), 0)))


def statistics(z: Tensor, targets: Tensor, valid: int, temperature: float, out: Tensor) -> None:
    """Compute the statistics of a head's logits: see `quintet.engine.head._statistics`. z: [n, rows], out: fp32 [4, n], both of
    stride 1 in their last dim."""
    if len(z):
        _statistics_kernel[(len(z),)](
            z,
            z.stride(0),
            targets,
            out,
            out.stride(0),
            valid,
            1.0 / temperature,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def log_probs(z: Tensor, tokens: Tensor) -> Tensor:
    """Compute `quintet.engine.head.log_probs_of`. z: [n, rows], of stride 1 in its last dim.

    A step of generation has few rows: the columns of each are many programs' work, which without sums for an entropy need no loop.
    """
    blocks = triton.cdiv(z.shape[1], LSE_BLOCK)
    lse, out = z.new_empty((len(z), blocks), dtype=torch.float32), z.new_empty(len(z), dtype=torch.float32)
    if len(z):
        _lse_kernel[(blocks, len(z))](
            z, z.stride(0), lse, blocks, z.shape[1], BLOCK=LSE_BLOCK, num_warps=WARPS
        )
        _log_prob_kernel[(len(z),)](
            z, z.stride(0), tokens, lse, out, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1
        )
    return out


def to_gradient_(
    z: Tensor,
    targets: Tensor,
    valid: int,
    temperature: float,
    lse: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Turn logits into their gradient in place: see `quintet.engine.head._to_gradient_`. z: [n, rows], the others [n]."""
    if not z.numel():
        return
    n, size = z.shape
    _gradient_kernel[(n, triton.cdiv(size, BLOCK))](
        z,
        z.stride(0),
        targets,
        lse,
        entropy,
        grad_log_prob.contiguous(),
        grad_log_prob if grad_entropy is None else grad_entropy.contiguous(),
        size,
        valid,
        1.0 / temperature,
        WITH_ENTROPY=grad_entropy is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
