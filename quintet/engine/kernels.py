"""Attention kernels: queries that see keys in spans, causally.

Span i of the queries sees span i of the keys, aligned at their ends: the last query sees every key of its span.
In a whole row both are the sequences; under context parallelism a span of queries is a chunk, and its keys are the
sequence up to the chunk's end.

GPU kernels read the row as it lies: TransformerEngine's, torch's `varlen_attn`, or the flash-attn package's, the
first that is there. They compute in half precision. Elsewhere spans of similar length form rectangles for torch's
SDPA: no mask where queries and keys are the same, and never one larger than a span.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.engine.device import upload
from quintet.packing import length_buckets

try:
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn: Any = None
else:
    varlen_attn = _varlen_attn

# torch 2.12 added the flag; before, fewer KV heads were accepted as they are.
_NEEDS_GQA_FLAG = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters

log = logging.getLogger(__name__)


@dataclass
class Rectangle:
    """Spans of similar length for SDPA: rows of queries q [B, Lq] and keys k [B, Lk], as positions (tails repeat the
    last token). mask [B, 1, Lq, Lk] is None where q and k are the same and causality is all there is."""

    q: Tensor
    k: Tensor
    mask: Tensor | None


@dataclass
class Spans:
    """Which queries see which keys. cu_q, cu_k: int32 [spans + 1] offsets; longest_q, longest_k: tokens.

    order: [T] brings the rectangles' queries, one after another, back to row order; None where the one rectangle is
    the row itself.
    """

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    same: bool
    rectangles: list[Rectangle] = field(default_factory=list)
    order: Tensor | None = None


Kernel = Callable[[Tensor, Tensor, Tensor, Spans, float | None], Tensor]
"""(query [Tq, heads, d], key [Tk, kv heads, d], value [Tk, kv heads, dv], spans, softmax scale) → [Tq, heads, dv]."""


def spans(q: Sequence[int], k: Sequence[int], device: torch.device, *, rectangles: bool) -> Spans:
    """Spans of given lengths. q and k are the same object where queries and keys are the same tokens."""
    starts_q = torch.tensor([0, *q]).cumsum(0)
    starts_k = starts_q if k is q else torch.tensor([0, *k]).cumsum(0)
    cu_q = upload(starts_q.int(), device)
    out = Spans(
        cu_q=cu_q,
        cu_k=cu_q if k is q else upload(starts_k.int(), device),
        longest_q=max(q),
        longest_k=max(k),
        same=k is q,
    )
    if rectangles:
        out.rectangles, out.order = _make_rectangles(q, k, starts_q, starts_k, device)
    return out


def _make_rectangles(
    q: Sequence[int], k: Sequence[int], starts_q: Tensor, starts_k: Tensor, device: torch.device
) -> tuple[list[Rectangle], Tensor | None]:
    total = int(starts_q[-1])
    if k is q and len(set(q)) == 1:
        whole = torch.arange(total, device=device).view(len(q), -1)
        return [Rectangle(whole, whole, None)], None
    sizes_q, sizes_k = torch.tensor(q), torch.tensor(k)
    out, order, start = [], torch.empty(total, dtype=torch.int64), 0
    for group in length_buckets(k):
        ids = torch.tensor(group)
        n, m = sizes_q[ids][:, None], sizes_k[ids][:, None]
        rows, columns = torch.arange(int(n.max())), torch.arange(int(m.max()))
        gather_q = starts_q[ids][:, None] + torch.minimum(rows[None], n - 1)
        inside = rows[None] < n
        place = start + torch.arange(gather_q.numel()).view(gather_q.shape)
        order[gather_q[inside]] = place[inside]
        start += gather_q.numel()
        if k is q:
            whole = gather_q.to(device)
            out.append(Rectangle(whole, whole, None))
            continue
        gather_k = starts_k[ids][:, None] + torch.minimum(columns[None], m - 1)
        mask = columns[None, None] <= rows[None, :, None] + (m - n)[:, :, None]
        out.append(Rectangle(gather_q.to(device), gather_k.to(device), mask[:, None].to(device)))
    return out, order.to(device)


def choose_kernel(device: torch.device, dtype: torch.dtype, backend: str) -> Kernel:
    """The kernel for a device, a type and a back end of layers. Which one is logged once."""
    name = _best(device, dtype, backend)
    _tell(name, device.type, str(dtype))
    return _KERNELS[name]


def kernel_title(device: torch.device, dtype: torch.dtype, backend: str) -> str:
    """What `choose_kernel` would take, in words."""
    return _TITLES[_best(device, dtype, backend)]


def reads_offsets(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel reads offsets (`cu_q`, `cu_k`) and needs no rectangles."""
    return _best(device, dtype, "portable") != "sdpa"


def _best(device: torch.device, dtype: torch.dtype, backend: str) -> str:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "sdpa"
    if backend == "transformer_engine":
        return "transformer_engine"
    if varlen_attn is not None:
        return "varlen_attn"
    return "flash_attn" if importlib.util.find_spec("flash_attn") else "sdpa"


@functools.cache
def _tell(name: str, device: str, dtype: str) -> None:
    log.info("attention on %s in %s: %s", device, dtype.removeprefix("torch."), _TITLES[name])


def _varlen(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None) -> Tensor:
    arguments: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if _NEEDS_GQA_FLAG and query.shape[1] != key.shape[1]:
        arguments["enable_gqa"] = True
    wide, narrow = query.shape[-1], value.shape[-1]
    value = F.pad(value, (0, wide - narrow)) if narrow < wide else value.contiguous()
    out: Tensor = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value,
        spans.cu_q,
        spans.cu_k,
        spans.longest_q,
        spans.longest_k,
        **arguments,
    )
    return out[..., :narrow]


def _flash(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    wide, narrow = query.shape[-1], value.shape[-1]
    out: Tensor = flash_attn_varlen_func(
        query,
        key,
        F.pad(value, (0, wide - narrow)),
        spans.cu_q,
        spans.cu_k,
        spans.longest_q,
        spans.longest_k,
        softmax_scale=scale,
        causal=True,
    )
    return out[..., :narrow]


@functools.cache
def _te_attention(heads: int, kv_heads: int, d: int, dv: int, scale: float | None) -> Any:
    import transformer_engine.pytorch as te

    return te.DotProductAttention(
        heads,
        (d, dv),
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=scale,
    )


def _transformer_engine(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None
) -> Tensor:
    if not spans.same and varlen_attn is not None:
        return _varlen(query, key, value, spans, scale)
    kernel = _te_attention(query.shape[1], key.shape[1], query.shape[2], value.shape[2], scale)
    out: Tensor = kernel(
        query,
        key,
        value,
        cu_seqlens_q=spans.cu_q,
        cu_seqlens_kv=spans.cu_k,
        max_seqlen_q=spans.longest_q,
        max_seqlen_kv=spans.longest_k,
        attn_mask_type="padding_causal" if spans.same else "padding_causal_bottom_right",
    )
    return out.view(len(query), query.shape[1], value.shape[2])


def _sdpa(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None) -> Tensor:
    repeat, narrow = query.shape[1] // key.shape[1], value.shape[-1]
    if repeat > 1:  # CPU's flash kernel has no grouped heads
        key, value = (
            t[:, :, None].expand(-1, -1, repeat, -1).reshape(len(t), -1, t.shape[2]) for t in (key, value)
        )
    if narrow < query.shape[-1]:  # nor values narrower than keys
        value = F.pad(value, (0, query.shape[-1] - narrow))
    out = []
    for one in spans.rectangles:
        q, k, v = (
            (t if spans.order is None else t.index_select(0, at.reshape(-1)))
            .view(*at.shape, *t.shape[1:])
            .transpose(1, 2)
            for t, at in ((query, one.q), (key, one.k), (value, one.k))
        )
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=one.mask, is_causal=one.mask is None, scale=scale
        )
        out.append(o.transpose(1, 2).reshape(one.q.numel(), *query.shape[1:]))
    rows = out[0] if spans.order is None else torch.cat(out).index_select(0, spans.order)
    return rows[..., :narrow]


_KERNELS: dict[str, Kernel] = {
    "transformer_engine": _transformer_engine,
    "varlen_attn": _varlen,
    "flash_attn": _flash,
    "sdpa": _sdpa,
}
_TITLES = {
    "transformer_engine": "TransformerEngine's fused kernel",
    "varlen_attn": "torch's varlen_attn (flash)",
    "flash_attn": "the flash-attn package",
    "sdpa": "torch's SDPA on groups of similar length",
}
