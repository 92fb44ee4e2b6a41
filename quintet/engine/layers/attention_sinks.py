"""Attention sinks: a learned logit a head that takes part in the softmax over the keys and has no value.

    P_ij = exp(S_ij) / (exp(s) + Σ_k exp(S_ik)),  O = P V        (https://arxiv.org/abs/2309.17453; gpt-oss's form)

No kernel has to know of it. Flash kernels give O and lse_i = log Σ_k exp(S_ik) without the sink. With

    lse' = log(exp(lse) + exp(s)),  O' = O · exp(lse − lse')

O' is what is wanted, and a flash kernel's backward pass, which recomputes P = exp(S − lse) and D = rowsum(dO ∘ O),
returns the exact gradients of q, k and v when it is given O' and lse'. The sink's column of P has the value 0, thus
ds = −Σ_i exp(s − lse'_i) D_i.

Kernels that give no lse see the sink as one more key, of value 0, whose product with a query is the sink.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Flash(Protocol):
    """A flash kernel on query [T, heads, d], key and value [T_k, kv heads, d], without sinks."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return out [T, heads, d] and lse [heads, T] in fp32."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""


def with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, flash: Flash) -> Tensor:
    """Compute a flash kernel's attention, with sinks [heads]: [T, heads, d]."""
    return _WithSinks.apply(query.contiguous(), key.contiguous(), value.contiguous(), sinks, flash)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, flash: Flash) -> Tensor:
        out, lse = add_sinks(*flash.forward(query, key, value), sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.flash = flash
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        wide = torch.promote_types(grad.dtype, torch.float32)
        shares = torch.exp(sinks.to(wide)[:, None] - lse)  # of the softmax that go to the sink
        grad_sinks = -(shares * (grad.to(wide) * out).sum(-1).t()).sum(1)
        return *ctx.flash.backward(grad, query, key, value, out, lse), grad_sinks.to(sinks.dtype), None


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return what out [T, heads, d] and lse [heads, T] become with sinks [heads]."""
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * torch.exp(lse - with_sink).t()[..., None]).to(out.dtype), with_sink


SPARE = 8
"""Dims added for the sink: kernels want widths that are multiples of 8."""


def sink_as_key(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value [..., tokens, d] with SPARE more dims, and the sink as a first key: its product with a query,
    times the scale, is that query's sink. sinks: broadcast to the query's rows [..., tokens]."""
    logit = (sinks / scale).to(query.dtype).expand(query.shape[:-1])[..., None]
    query = torch.cat((query, F.pad(logit, (0, SPARE - 1))), -1)
    first = torch.zeros_like(key[..., :1, :])
    first = F.pad(torch.cat((first, torch.ones_like(first[..., :1])), -1), (0, SPARE - 1))
    key = torch.cat((first, F.pad(key, (0, SPARE))), -2)
    return query, key, F.pad(value, (0, SPARE, 1, 0))
