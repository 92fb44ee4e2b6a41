"""A KV cache of slots: one sequence a slot, active slots always at the front.

Decoding then reads a slice of the cache, with no gather and no page table. A sequence that ends gives its slot
to the last active one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.engine.layers.attention_backends import AttentionParams, Seen, reads_offsets
from quintet.engine.layers.attention_sinks import add_sinks, sink_as_key


class SlotCache:
    """Keys and values of one rank's layers, [slots, capacity, kv heads, head_dim] each. Values narrower than keys (latent
    attention) are kept as wide: the flash kernel knows one width.

    The engine's attention calls `attend` with every row it computes; `prefill` and `decode` say beforehand what
    the row is.
    """

    def __init__(
        self,
        layers: list[int],
        slots: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots, self.capacity = slots, capacity
        shape = (slots, capacity, kv_heads, head_dim)
        self.keys = {i: torch.zeros(shape, dtype=dtype, device=device) for i in layers}
        self.values = {i: torch.zeros(shape, dtype=dtype, device=device) for i in layers}
        self._write = torch.empty(0, dtype=torch.int64, device=device)
        self._source: Tensor | None = None
        self._decoding = 0
        self._length = 0
        self._seen = Seen(self._write, 0)
        self._queries: Tensor | None = None
        self._starts: Tensor | None = None
        self._used: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(one.nbytes for one in (*self.keys.values(), *self.values.values()))

    def fits(self, slots: int, capacity: int) -> bool:
        return self.slots >= slots and self.capacity >= capacity

    def prefill(self, source: Tensor, slot: Tensor, position: Tensor) -> None:
        """Prepare for a row of prompts: row token `source[i]` is kept at (slot[i], position[i])."""
        self._decoding, self._source = 0, source
        self._write = slot * self.capacity + position

    def decode(self, positions: Tensor, longest: int) -> None:
        """Prepare for a row of one token of each of the first slots, at `positions` [active]; longest = their max + 1."""
        self._decoding, self._source = len(positions), None
        slots = torch.arange(len(positions), device=positions.device)
        self._write = slots * self.capacity + positions
        self._length = longest
        if positions.device.type == "cuda":
            bounds = torch.arange(len(positions) + 1, device=positions.device, dtype=torch.int32)
            self._queries, self._starts = bounds, bounds * self.capacity
            self._used = (positions + 1).to(torch.int32)
        self._seen = Seen(positions[:, None], longest)

    def attend(self, attention: Any, query: Tensor, key: Tensor, value: Tensor, row: Any) -> Tensor:
        """Keep keys and values, and attend: within the row when prefilling, to the cache when decoding."""
        keys, values = self.keys[attention.layer_number], self.values[attention.layer_number]
        narrow, wide = value.shape[-1], values.shape[-1]
        if narrow < wide:
            out = self.attend(attention, query, key, F.pad(value, (0, wide - narrow)), row)
            return out[..., :narrow]
        flat_keys, flat_values = keys.view(-1, *keys.shape[2:]), values.view(-1, *values.shape[2:])
        if not self._decoding:
            assert self._source is not None
            flat_keys.index_copy_(0, self._write, key.index_select(0, self._source))
            flat_values.index_copy_(0, self._write, value.index_select(0, self._source))
            return attention.within(query, key, value, row)
        n = self._decoding
        flat_keys.index_copy_(0, self._write, key[:n])
        flat_values.index_copy_(0, self._write, value[:n])
        how: AttentionParams = attention.weighing
        if reads_offsets(query.device, query.dtype):
            out = self._flash(query[:n], flat_keys, flat_values, how)
        else:
            out = self._masked(query[:n], keys[:n, : self._length], values[:n, : self._length], how)
        if len(query) > n:  # rows that only pad for sequence parallelism
            out = torch.cat((out, out.new_zeros(len(query) - n, *out.shape[1:])))
        return out

    def _masked(self, query: Tensor, keys: Tensor, values: Tensor, how: AttentionParams) -> Tensor:
        """One query a slot over the longest active length. Query heads of one KV group become query rows of that
        head: grouped attention without repeating keys."""
        n, heads, kv_heads = len(query), query.shape[1], keys.shape[2]
        q = query.view(n, kv_heads, heads // kv_heads, -1)
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        scale = how.scale_of(q)
        if how.sinks is not None:
            q, k, v = sink_as_key(q, k, v, how.sinks.view(kv_heads, -1), scale)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._seen.mask(how, q.dtype), scale=scale)
        return out[..., : query.shape[2]].reshape(n, heads, -1)

    def _flash(self, query: Tensor, keys: Tensor, values: Tensor, how: AttentionParams) -> Tensor:
        """The flash kernel on slots as they lie: sequence i starts at row i * capacity and has `seqused_k[i]` keys, so
        no key past a sequence's end is read. (benchmarks/kv_cache.py compares.)"""
        # Without a window the kernel may lay query heads of a group out as queries, and their lse with them.
        plain = how.window is None and how.sinks is None
        left, right = (-1, -1) if plain else how.reach
        out, lse = torch.ops.aten._flash_attention_forward(
            query.contiguous(), keys, values, self._queries, self._starts, 1, self._length, 0.0, False, False,
            scale=how.scale, seqused_k=self._used, window_size_left=left, window_size_right=right,
        )[:2]  # fmt: skip
        return out if how.sinks is None else add_sinks(out, lse, how.sinks)[0]

    def move(self, source: list[int], target: list[int], tokens: int) -> None:
        """Copy the first `tokens` of whole slots; no slot is both a source and a target."""
        for store in (*self.keys.values(), *self.values.values()):
            store[target, :tokens] = store[source, :tokens]
