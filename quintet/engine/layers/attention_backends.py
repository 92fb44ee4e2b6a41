"""Attention kernels: queries that see keys in spans, causally.

Span i of the queries sees span i of the keys, aligned at their ends: the last query sees every key of its span.
In a whole row both are the sequences; under context parallelism a span of queries is a chunk, and its keys are the
sequence up to the chunk's end. `AttentionParams` says how a query weighs the keys it sees, and how far back it sees.

GPU kernels read the row as it lies: TransformerEngine's, or torch's `varlen_attn`. They compute in half precision.
Elsewhere spans of similar length form rectangles for torch's SDPA: no mask where causality is all there is, and never
one larger than a span.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.engine.device import upload
from quintet.engine.layers.attention_sinks import sink_as_key, with_sinks
from quintet.packing.buckets import length_buckets

varlen_attn: Any = None
if torch.cuda.is_available():  # it has kernels for GPUs only, and imports torch's compiler
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn

    varlen_attn = _varlen_attn

# torch 2.12 added the flag; before, fewer KV heads were accepted as they are.
_NEEDS_GQA_FLAG = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """How a query weighs keys: softmax(scale · q kᵀ) over those it sees.

    scale: None is 1/√d. window: a query sees the last so many keys of what causality leaves, its own among them; None
    is all. sinks: [heads] logits in the softmax beside the keys' (`quintet.engine.layers.attention_sinks`).
    """

    scale: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    def scale_of(self, query: Tensor) -> float:
        """Return the scale as a number. query: [..., d]."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def reach(self) -> tuple[int, int]:
        """The number of keys before and after its own place a query sees, in the flash kernels' words."""
        return (-1 if self.window is None else self.window - 1), 0


@dataclass
class Seen:
    """Which keys queries see. last: [B or 1, Lq] which of the `keys` keys is the last that a query sees."""

    last: Tensor
    keys: int
    _masks: dict[tuple[int | None, bool], Tensor] = field(default_factory=dict)

    def mask(self, how: AttentionParams, dtype: torch.dtype) -> Tensor:
        """Return what is added to scores, 0 or -inf: [B or 1, 1, Lq, Lk], with sinks [B or 1, 1, Lq, 1 + Lk]. Made once for all
        layers that look alike: of a mask of true and false, SDPA keeps a copy a layer."""
        key = (how.window, how.sinks is not None)
        if key not in self._masks:
            columns, last = torch.arange(self.keys, device=self.last.device), self.last[..., None]
            mask = columns <= last
            if how.window is not None:
                mask &= columns > last - how.window
            hidden = ~F.pad(mask, (int(key[1]), 0), value=True)[:, None]
            self._masks[key] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return self._masks[key]


@dataclass
class Rectangle:
    """Spans of similar length for SDPA: rows of queries q [B, Lq] and keys k [B, Lk], as positions (tails repeat the
    last token). same: q and k are the same."""

    q: Tensor
    k: Tensor
    seen: Seen
    same: bool

    def mask(self, how: AttentionParams, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to scores; None where causality is all there is."""
        plain = self.same and how.window is None and how.sinks is None
        return None if plain else self.seen.mask(how, dtype)


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


Kernel = Callable[[Tensor, Tensor, Tensor, Spans, AttentionParams], Tensor]
"""(query [Tq, heads, d], key [Tk, kv heads, d], value [Tk, kv heads, dv], spans, weighing) → [Tq, heads, dv]."""


def spans(q: Sequence[int], k: Sequence[int], device: torch.device, *, rectangles: bool) -> Spans:
    """Return the spans of given lengths. q and k are the same object where queries and keys are the same tokens."""
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
        return [Rectangle(whole, whole, Seen(torch.arange(q[0], device=device)[None], q[0]), True)], None
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
            out.append(Rectangle(whole, whole, Seen(rows[None].to(device), len(rows)), True))
            continue
        gather_k = starts_k[ids][:, None] + torch.minimum(columns[None], m - 1)
        last = torch.minimum(rows[None], n - 1) + (m - n)
        seen = Seen(last.to(device), len(columns))
        out.append(Rectangle(gather_q.to(device), gather_k.to(device), seen, False))
    return out, order.to(device)


def choose_kernel(device: torch.device, dtype: torch.dtype, backend: str, *, sinks: bool = False) -> Kernel:
    """Return the kernel for a device, a type and a back end of layers. Which one is logged once."""
    name = _best(device, dtype, backend, sinks)
    _tell(name, device.type, str(dtype))
    return _KERNELS[name][0]


def kernel_title(device: torch.device, dtype: torch.dtype, backend: str, *, sinks: bool = False) -> str:
    """Return what `choose_kernel` would take, in words."""
    return _KERNELS[_best(device, dtype, backend, sinks)][1]


def reads_offsets(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel reads offsets (`cu_q`, `cu_k`) and needs no rectangles, whichever of a GPU's it is."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _best(device: torch.device, dtype: torch.dtype, backend: str, sinks: bool) -> str:
    if not reads_offsets(device, dtype):
        return "sdpa"
    # Of sinks, what takes part in the backward pass is torch's own operator.
    return "transformer_engine" if backend == "transformer_engine" and not sinks else "varlen_attn"


@functools.cache
def _tell(name: str, device: str, dtype: str) -> None:
    log.info("attention on %s in %s: %s", device, dtype.removeprefix("torch."), _KERNELS[name][1])


def _varlen(query: Tensor, key: Tensor, value: Tensor, spans: Spans, how: AttentionParams) -> Tensor:
    wide, narrow = query.shape[-1], value.shape[-1]
    value = F.pad(value, (0, wide - narrow)) if narrow < wide else value.contiguous()
    if how.sinks is not None:
        return with_sinks(query, key, value, how.sinks, _TorchFlash(spans, how))[..., :narrow]
    arguments: dict[str, Any] = {"scale": how.scale, "window_size": how.reach}
    if _NEEDS_GQA_FLAG and query.shape[1] != key.shape[1]:
        arguments["enable_gqa"] = True
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


class _TorchFlash:
    """The operators under `varlen_attn`, forwards and backwards (`quintet.engine.layers.attention_sinks.Flash`)."""

    def __init__(self, spans: Spans, how: AttentionParams) -> None:
        self._where = (spans.cu_q, spans.cu_k, spans.longest_q, spans.longest_k, 0.0, how.window is None)
        left, right = how.reach
        self._how = {"scale": how.scale, "window_size_left": left, "window_size_right": right}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten._flash_attention_forward(query, key, value, *self._where, False, **self._how)
        return found[0], found[1]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The random state of a dropout that there is none of.
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty(0, device=query.device)
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, *self._where, seed, unused, **self._how
        )


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
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, how: AttentionParams
) -> Tensor:
    if how.window is not None or not spans.same:
        return _varlen(query, key, value, spans, how)
    kernel = _te_attention(query.shape[1], key.shape[1], query.shape[2], value.shape[2], how.scale)
    out: Tensor = kernel(
        query,
        key,
        value,
        cu_seqlens_q=spans.cu_q,
        cu_seqlens_kv=spans.cu_k,
        max_seqlen_q=spans.longest_q,
        max_seqlen_kv=spans.longest_k,
    )
    return out.view(len(query), query.shape[1], value.shape[2])


def _sdpa(query: Tensor, key: Tensor, value: Tensor, spans: Spans, how: AttentionParams) -> Tensor:
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
        scale, mask = how.scale_of(q), one.mask(how, q.dtype)
        if how.sinks is not None:
            q, k, v = sink_as_key(q, k, v, how.sinks[:, None], scale)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        out.append(o[..., : query.shape[2]].transpose(1, 2).reshape(one.q.numel(), *query.shape[1:]))
    rows = out[0] if spans.order is None else torch.cat(out).index_select(0, spans.order)
    return rows[..., :narrow]


_KERNELS: dict[str, tuple[Kernel, str]] = {
    "transformer_engine": (_transformer_engine, "TransformerEngine's fused kernel"),
    "varlen_attn": (_varlen, "torch's varlen_attn (flash)"),
    "sdpa": (_sdpa, "torch's SDPA on groups of similar length"),
}
"""Kernels, each with its title in words."""
