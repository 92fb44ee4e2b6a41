"""A packed micro-batch (THD) as tensors: the row of tokens, where each sequence lies, and what is trained.

`pack` is the only place where padding enters, and it follows `quintet.packing.Alignment`. Token t's log-prob is
read off the hidden state at t - 1 of the same sequence, so a row carries `predictors`: the row positions whose
output is wanted, and `targets`: the tokens they predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from quintet.packing import Alignment, length_buckets


@dataclass
class Row(PackedSeqParams):
    """What every layer needs to know of a micro-batch.

    cos, sin: rotary tables [T, 1, 1, head_dim / 2] at each token's position in its own sequence.
    rectangles, order: how SDPA sees the row. A rectangle [B, L] holds row positions of sequences of similar length
    (tails repeat the last token); `order` [T] brings the concatenated rectangles back to row order, and is None
    where the one rectangle is the row itself.
    cache: the KV cache in generation, else None.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    rectangles: list[Tensor] = field(default_factory=list)
    order: Tensor | None = None
    cache: Any = None


@dataclass
class MicroBatch:
    """One packed micro-batch of one rank.

    input_ids: [1, T]. positions: [T], in each token's own sequence. lengths: of the sequences, padding included.
    predictors: [N] row positions whose next token is trained; targets: [N] those tokens;
    token_index: [N] where the targets lie in the flat values of the rank's batch; sample: [N] their samples.
    """

    input_ids: Tensor
    positions: Tensor
    lengths: list[int]
    predictors: Tensor
    targets: Tensor
    token_index: Tensor
    sample: Tensor

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]


def pack(
    values: Tensor,
    offsets: Tensor,
    trained: Tensor,
    samples: Sequence[int],
    alignment: Alignment,
) -> MicroBatch:
    """Pack samples of a batch into one row.

    values: [tokens] int64, flat token ids of the batch. offsets: [samples + 1]. trained: [tokens] bool, tokens whose
    log-prob is wanted; a sample's first token has no predecessor and is never trained. samples: which ones, in row
    order; none gives a row of padding alone.
    """
    starts = [int(offsets[i]) for i in samples]
    sizes = [int(offsets[i + 1]) - a for i, a in zip(samples, starts, strict=True)]
    padded = [alignment.padded(n) for n in sizes]
    total = alignment.row(sizes)
    lengths = padded + ([total - sum(padded)] if total > sum(padded) else [])

    source = torch.zeros(total, dtype=torch.int64)  # position in `values` of each row token
    real = torch.zeros(total, dtype=torch.bool)
    if samples:
        begin = torch.tensor([0, *padded]).cumsum(0)[:-1]
        n = torch.tensor(sizes)
        within = torch.arange(int(n.sum())) - (n.cumsum(0) - n).repeat_interleave(n)
        at = begin.repeat_interleave(n) + within
        source[at] = torch.tensor(starts).repeat_interleave(n) + within
        real[at] = True
    input_ids = torch.where(real, values[source], 0) if len(values) else torch.zeros(total, dtype=torch.int64)
    positions = torch.cat([torch.arange(k) for k in lengths])

    wanted = real & (positions > 0)
    if len(values):
        wanted &= trained[source]
    target_at = wanted.nonzero()[:, 0]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[target_at]
    numbers = torch.tensor([*samples, -1])
    return MicroBatch(
        input_ids=input_ids[None],
        positions=positions,
        lengths=lengths,
        predictors=target_at - 1,
        targets=input_ids[target_at],
        token_index=source[target_at],
        sample=numbers[owner],
    )


def describe(micro: MicroBatch, device: torch.device, *, rectangles: bool) -> Row:
    """The `Row` of a micro-batch, without rotary tables (the model adds them).

    rectangles: whether the attention kernel wants them; the varlen kernels read cu_seqlens instead.
    """
    ends = torch.tensor([0, *micro.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cu = ends.to(device)
    row = Row(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu,
        max_seqlen_q=max(micro.lengths),
        max_seqlen_kv=max(micro.lengths),
    )
    if rectangles:
        row.rectangles, row.order = _rectangles(micro.lengths, ends.to(torch.int64), device)
    return row


def _rectangles(lengths: list[int], ends: Tensor, device: torch.device) -> tuple[list[Tensor], Tensor | None]:
    groups = length_buckets(lengths)
    total = int(ends[-1])
    if len(groups) == 1 and len(groups[0]) == len(lengths) and len(set(lengths)) == 1:
        return [torch.arange(total, device=device).view(len(lengths), -1)], None
    out, order, start = [], torch.empty(total, dtype=torch.int64), 0
    sizes = torch.tensor(lengths)
    for group in groups:
        ids = torch.tensor(group)
        longest = int(sizes[ids].max())
        step = torch.arange(longest)
        gather = ends[ids][:, None] + torch.minimum(step[None], sizes[ids][:, None] - 1)
        inside = step[None] < sizes[ids][:, None]
        place = start + torch.arange(len(group) * longest).view(len(group), longest)
        order[gather[inside]] = place[inside]
        out.append(gather.to(device))
        start += len(group) * longest
    return out, order.to(device)
