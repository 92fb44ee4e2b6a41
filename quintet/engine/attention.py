"""Causal self-attention over packed sequences, for training and for generation with a KV cache.

`PackedSelfAttention` keeps megatron-core's projections and norms and replaces what lies between: rotary
embedding by explicit positions (so that a token's position never depends on how a row was cut), and attention
that never lets a token see another sequence. On GPU the flash kernel `varlen_attn` reads the packed row as
it is; elsewhere sequences of similar length form rectangles for SDPA, without any O(T²) mask.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from quintet.engine.row import Row

try:
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn: Any = None
else:
    varlen_attn = _varlen_attn

# torch 2.12 added the flag; before, fewer KV heads were accepted as they are.
_NEEDS_GQA_FLAG = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters


def uses_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the flash kernel serves: CUDA, half precision."""
    return varlen_attn is not None and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention. x: [T, 1, heads, d]; cos, sin: [T, 1, 1, d / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PackedSelfAttention(SelfAttention):
    """Self-attention whose `packed_seq_params` is a `Row`. Hidden states are [T (/tp under SP), 1, hidden]."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the projected output like `hidden_states`, and the projection's bias (None)."""
        row: Row = kwargs["packed_seq_params"]
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        assert row.cos is not None
        assert row.sin is not None
        query, key = rotate(query, row.cos, row.sin), rotate(key, row.cos, row.sin)
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if self.checkpoint_core_attention and self.training:
            from megatron.core.tensor_parallel import checkpoint

            context = checkpoint(lambda q, k, v: self.core_attention(q, k, v, row), False, query, key, value)
        else:
            context = self.core_attention(query, key, value, row)
        out, bias = self.linear_proj(context.flatten(1).unsqueeze(1))
        return out, bias


class CoreAttention(torch.nn.Module):
    """softmax(q kᵀ · scale) v within each sequence. [T, heads, d], [T, kv heads, d] → [T, heads, d]."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, row: Row) -> Tensor:
        if row.cache is not None:
            out: Tensor = row.cache.attend(self, query, key, value, row)
            return out
        return self.within(query, key, value, row)

    def within(self, query: Tensor, key: Tensor, value: Tensor, row: Row) -> Tensor:
        """Attention among the tokens of the row."""
        if uses_varlen(query.device, query.dtype):
            return _varlen(query, key, value, row, self.scale)
        return _rectangles(query, key, value, row, self.scale)


def _varlen(query: Tensor, key: Tensor, value: Tensor, row: Row, scale: float | None) -> Tensor:
    arguments: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if _NEEDS_GQA_FLAG and query.shape[1] != key.shape[1]:
        arguments["enable_gqa"] = True
    cu, longest = row.cu_seqlens_q, row.max_seqlen_q
    out: Tensor = varlen_attn(
        query, key.contiguous(), value.contiguous(), cu, cu, longest, longest, **arguments
    )
    return out


def _rectangles(query: Tensor, key: Tensor, value: Tensor, row: Row, scale: float | None) -> Tensor:
    """SDPA on groups of sequences of similar length. Where one group holds the row as it is, nothing is moved."""
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:  # CPU's flash kernel has no grouped heads
        key, value = (
            t[:, :, None].expand(-1, -1, repeat, -1).reshape(len(t), -1, t.shape[2]) for t in (key, value)
        )
    out = []
    for gather in row.rectangles:
        b, length = gather.shape
        flat = gather.reshape(-1)
        q, k, v = (
            (t if row.order is None else t.index_select(0, flat))
            .view(b, length, *t.shape[1:])
            .transpose(1, 2)
            for t in (query, key, value)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        out.append(o.transpose(1, 2).reshape(b * length, *query.shape[1:]))
    if row.order is None:
        return out[0]
    return torch.cat(out).index_select(0, row.order)
