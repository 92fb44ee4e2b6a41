"""Tokens on their way to the ranks of their experts and back: each goes once to a rank, however many of its experts are there.

megatron-core's all-to-all sends a token once an expert: of 8 experts at ep 4, 6 rows leave the rank on average, where 2.7 other ranks
want them. Here the receiving rank hands a row to each of its experts that the token chose, and adds up what they make of it before it goes
back (as DeepEP does, https://github.com/deepseek-ai/DeepEP; over NCCL or gloo, and between the ranks of any layout).

    y_t = Σ_r Σ_{e on r} p_te · f_e(x_t)

Rows are put in order by core's functions, in both places, with TransformerEngine's kernels where the configuration has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from torch import Tensor

from quintet.engine.device import download

NOT_CHOSEN = -1.0
"""Travels as the weight of an expert that a token did not choose. Weights are never negative, and may be 0."""


@dataclass(frozen=True)
class _Leg:
    """How rows were put in order, so that they can be put back. map: [rows, places] which places a row was copied to. order: core's, or
    None where they stayed as they were."""

    rows: int
    map: Tensor
    order: Tensor | None


@dataclass(frozen=True)
class _Counts:
    """Rows between this rank and the others. sent, received: to and from each rank of ep; of_etp: received by each rank of etp."""

    sent: list[int]
    received: list[int]
    of_etp: list[int]


@dataclass(frozen=True)
class Dispatched:
    """What this rank's experts are to compute. tokens: [n, hidden] sorted by expert; per_expert: how many are of each, on the CPU; weights: [n]."""

    tokens: Tensor
    per_expert: Tensor
    weights: Tensor
    counts: _Counts
    to_ranks: _Leg
    to_experts: _Leg


class Dispatcher:
    """Sends tokens to experts and brings back what these made of them, over the expert groups of a layer. Has no state."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        self._groups = groups
        self._ep, self._etp = groups.ep.size(), groups.expt_tp.size()
        assert config.num_moe_experts is not None
        self._here = config.num_moe_experts // self._ep
        self._top_k, self._fused = config.moe_router_topk, config.moe_permute_fusion

    def dispatch(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Dispatched:
        """Bring tokens [T, hidden] to the ranks of the experts that they chose. weights: [T, experts], 0 or more; chosen: the same as bool, top_k a
        token."""
        ranks = chosen.view(-1, self._ep, self._here).any(-1)
        told = download(self._count(ranks, chosen))
        rows, marks, to_ranks = tokens, weights.where(chosen, NOT_CHOSEN), _Leg(len(tokens), ranks, None)
        if self._ep > 1:  # at most: how many are known once the counts have come
            most = len(tokens) * min(self._ep, self._top_k)
            rows, _, order = permute(tokens, ranks, num_out_tokens=most, fused=self._fused)
            to_ranks = _Leg(len(tokens), ranks, order)
            marks = marks.view(-1, self._ep, self._here).transpose(0, 1).reshape(-1, self._here)
            marks = marks.index_select(
                0, torch.nonzero_static(ranks.t().reshape(-1), size=most, fill_value=0)[:, 0]
            )
        counts, per_expert = self._read(told())
        if self._ep > 1:
            rows, marks = (
                _AllToAll.apply(x, counts.sent, counts.received, self._groups.ep) for x in (rows, marks)
            )
        if self._etp > 1:
            rows, marks = (
                gather_from_sequence_parallel_region(
                    x, group=self._groups.expt_tp, output_split_sizes=counts.of_etp
                )
                for x in (rows, marks)
            )
        here = marks >= 0
        sorted_, of_each, order = permute(
            rows,
            here,
            probs=marks,
            num_out_tokens=int(per_expert.sum()),
            fused=self._fused and self._here > 1,
        )
        return Dispatched(sorted_, per_expert, of_each, counts, to_ranks, _Leg(len(rows), here, order))

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        """Return for each token the sum of what its experts made of it: [T, hidden]. out: [n, hidden] in the order of `Dispatched.tokens`, under
        etp this rank's share."""
        rows = self._back(out, sent.to_experts, self._fused and self._here > 1)
        if self._etp > 1:
            wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
            splits = sent.counts.of_etp
            rows = reduce_scatter_to_sequence_parallel_region(
                wide, group=self._groups.expt_tp, input_split_sizes=splits
            )
            rows = rows.to(out.dtype)
        if self._ep > 1:
            rows = _AllToAll.apply(rows, sent.counts.received, sent.counts.sent, self._groups.ep)
            rows = self._back(rows, sent.to_ranks, self._fused)
        return rows

    @staticmethod
    def _back(out: Tensor, leg: _Leg, fused: bool) -> Tensor:
        shape = torch.Size((leg.rows, out.shape[1]))
        return unpermute(out, leg.order, restore_shape=shape, routing_map=leg.map, fused=fused)

    def _count(self, ranks: Tensor, chosen: Tensor) -> Tensor:
        """Of each rank of the expert groups: how many rows it sends to each rank of ep, then how many of its tokens chose each expert."""
        mine = torch.cat((ranks.sum(0), chosen.sum(0)))
        if self._ep * self._etp == 1:
            return mine
        every = mine.new_empty(self._ep * self._etp * len(mine))
        dist.all_gather_into_tensor(every, mine, group=self._groups.tp_ep)
        return every

    def _read(self, every: Tensor) -> tuple[_Counts, Tensor]:
        """What `_count` says of this rank, and how many tokens each of its experts gets."""
        ep, etp = self._groups.ep.rank(), self._groups.expt_tp.rank()
        table = every.view(self._ep, self._etp, -1)
        rows, tokens = table[..., : self._ep], table[..., self._ep :]
        mine = tokens[..., ep * self._here : (ep + 1) * self._here]
        counts = _Counts(rows[ep, etp].tolist(), rows[:, etp, ep].tolist(), rows[:, :, ep].sum(0).tolist())
        return counts, mine.sum((0, 1))


class _AllToAll(torch.autograd.Function):
    """Rows to each rank of a group and from each. What a rank has may be longer than what it sends; the gradient of the rest is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.rows, ctx.sent, ctx.received, ctx.group = len(x), sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x[: sum(sent)].contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        end = sum(ctx.sent)
        out = grad.new_empty(ctx.rows, *grad.shape[1:])
        out[end:] = 0
        dist.all_to_all_single(out[:end], grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return out, None, None, None
