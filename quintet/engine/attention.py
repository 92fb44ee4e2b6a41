"""Causal self-attention over packed sequences, for training and for generation with a KV cache.

`PackedSelfAttention` keeps megatron-core's projections and norms and replaces what lies between: rotary
embedding by explicit positions (so that a token's position never depends on how a row was cut), and attention
that never lets a token see another sequence. `CoreAttention` is that attention, in every layout: it lets the ranks
that share a row exchange what they need (`quintet.engine.context`) and calls a kernel (`quintet.engine.kernels`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from quintet.engine.device import runs_fused
from quintet.engine.kernels import choose_kernel
from quintet.engine.row import Row


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention. x: [T, 1, heads, d]; cos, sin: [T, 1, 1, d / 2]."""
    if runs_fused(x):
        from quintet.engine import rotary_kernels

        return rotary_kernels.rotate(x, cos, sin)
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
    """softmax(q kᵀ · scale) v within each sequence. [T, heads, d], [T, kv heads, d], [T, kv heads, dv] → [T, heads, dv]."""

    backend = "portable"

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
        assert row.spans is not None
        kernel = choose_kernel(query.device, query.dtype, self.backend)
        if row.exchange is None:
            return kernel(query, key, value, row.spans, self.scale)
        query, key, value = row.exchange.before(query, key, value)
        return row.exchange.after(kernel(query, key, value, row.spans, self.scale))


class TransformerEngineAttention(CoreAttention):
    """The same, with TransformerEngine's kernel where it can serve."""

    backend = "transformer_engine"
