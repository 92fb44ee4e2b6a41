"""Causal self-attention over packed sequences, for training and for generation with a KV cache.

`PackedSelfAttention` keeps megatron-core's projections and norms and replaces what lies between: rotary
embedding by explicit positions (so that a token's position never depends on how a row was cut), and attention
that never lets a token see another sequence. `CoreAttention` is that attention, in every layout: it lets the ranks
that share a row exchange what they need (`quintet.engine.layers.context_parallel`) and calls a kernel (`quintet.engine.layers.attention_backends`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from quintet.engine.device import runs_fused
from quintet.engine.layers.attention_backends import AttentionParams, choose_kernel
from quintet.engine.row import PackedRow


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding, halves convention, of a head's first dims. x: [T, 1, heads, d]; cos, sin: [T, 1, 1, r / 2] of the
    r <= d dims that are turned."""
    if runs_fused(x):
        from quintet.engine.triton import rotary as rotary_kernels

        return rotary_kernels.rotate(x, cos, sin)
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def attend(core: Any, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, again: bool) -> Tensor:
    """Compute `CoreAttention`; again: anew in backward, where nothing of it is kept."""
    compute = partial(core, row=row)
    return checkpoint(compute, False, query, key, value) if again else compute(query, key, value)


class PackedSelfAttention(SelfAttention):
    """Self-attention whose `packed_seq_params` is a `PackedRow`. Hidden states are [T (/tp under SP), 1, hidden]."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the projected output like `hidden_states`, and the projection's bias or None, yet to be added."""
        row: PackedRow = kwargs["packed_seq_params"]
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        assert row.cos is not None
        assert row.sin is not None
        query, key = rotate(query, row.cos, row.sin), rotate(key, row.cos, row.sin)
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        again = self.checkpoint_core_attention and self.training
        context = attend(self.core_attention, query, key, value, row, again)
        out, bias = self.linear_proj(context.flatten(1).unsqueeze(1))
        return out, bias


class CoreAttention(torch.nn.Module):
    """softmax(q kᵀ · scale) v within each sequence. [T, heads, d], [T, kv heads, d], [T, kv heads, dv] → [T, heads, dv].

    window: how many keys a query sees, itself among them; None is all. sinks: whether each head has a logit besides
    (`softmax_offset` [heads / tp], megatron-core's name).
    """

    backend = "portable"

    def __init__(
        self,
        config: Any,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        *,
        window: int | None = None,
        sinks: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.scale, self.window = softmax_scale, window
        if sinks:
            heads = config.num_attention_heads // pg_collection.tp.size()
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(heads, dtype=config.params_dtype, device=device)
            )
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        else:
            self.register_parameter("softmax_offset", None)

    @property
    def weighing(self) -> AttentionParams:
        """The `AttentionParams`, with the sinks of all heads of this rank."""
        return AttentionParams(self.scale, self.window, self.softmax_offset)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        if row.cache is not None:
            return row.cache.attend(self, query, key, value, row)
        return self.within(query, key, value, row)

    def within(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        """Compute attention among the tokens of the row."""
        assert row.spans is not None
        how = self.weighing
        kernel = choose_kernel(query.device, query.dtype, self.backend, sinks=how.sinks is not None)
        if row.exchange is None:
            return kernel(query, key, value, row.spans, how)
        if how.sinks is not None:
            how = replace(how, sinks=row.exchange.of_heads(how.sinks))
        query, key, value = row.exchange.before(query, key, value)
        return row.exchange.after(kernel(query, key, value, row.spans, how))


class TransformerEngineAttention(CoreAttention):
    """The attention of `CoreAttention`, with TransformerEngine's kernel where it can serve."""

    backend = "transformer_engine"
