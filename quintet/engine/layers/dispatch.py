"""Tokens on their way to the ranks of their experts and back: each goes once to a rank, however many of its experts are there.

megatron-core's all-to-all sends a token once an expert: of 8 experts at ep 4, 6 rows leave the rank on average, where 2.7 other ranks
want them. Here the receiving rank hands a row to each of its experts that the token chose, and adds up what they make of it before it goes
back (as DeepEP does, https://github.com/deepseek-ai/DeepEP; over NCCL or gloo, and between the ranks of any layout).

    y_t = Σ_r Σ_{e on r} p_te · f_e(x_t)

Rows are copied to places and added up again by TransformerEngine's kernels where the configuration has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Experts = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, None]]
"""(tokens [n, hidden] sorted by expert, how many are of each, on the CPU, and weights [n]) → what they are made into, and no bias."""


@dataclass(frozen=True)
class _Order:
    """How rows were copied to places, so that they can be brought back. map: [rows, places] which row went where; core: the order as core's
    `unpermute` takes it."""

    map: Tensor
    core: Tensor
    fused: bool

    @staticmethod
    def of(rows: Tensor, map: Tensor, place: Tensor, fused: bool) -> tuple[_Order, Tensor]:
        """Return it, and the copies of the rows, those of a place together. place: `_places` of the map."""
        if fused:
            copies, _, order = permute(rows, map, num_out_tokens=len(place), fused=True)
            return _Order(map, order, True), copies
        row = place % max(len(rows), 1)  # core's own would hold the host until the map is there
        return _Order(map, row, False), rows.index_select(0, row)

    def back(self, copies: Tensor) -> Tensor:
        """Return for each row the sum of its copies."""
        order = self.core if self.fused else self.core[: len(copies)]
        shape = torch.Size((len(self.map), copies.shape[1]))
        return unpermute(copies, order, restore_shape=shape, routing_map=self.map, fused=self.fused)


def _places(map: Tensor, count: int) -> Tensor:
    """Return where the map [rows, places] is set, place by place, as place · rows + row: [count]. Where that is more than are set, the rest are all
    different, so that nothing is added up in one spot."""
    found = torch.nonzero_static(map.t().reshape(-1), size=count, fill_value=-1)[:, 0]
    rest = torch.arange(count, device=map.device) % max(map.numel(), 1)
    return torch.where(found < 0, rest, found)


@dataclass(frozen=True)
class _Counts:
    """Rows between this rank and the others. sent, received: to and from each rank of ep; of_etp: received by each rank of etp. per_expert: tokens
    of each expert here."""

    sent: list[int]
    received: list[int]
    of_etp: list[int]
    per_expert: Tensor


class Dispatcher:
    """Has tokens go through the experts of all ranks, over the expert groups of a layer. Keeps nothing."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        self.groups = groups
        self.parts = 1
        """How many a row is cut into, so that one travels while another is computed, in backward too."""
        self.ep, self.etp = groups.ep.size(), groups.expt_tp.size()
        assert config.num_moe_experts is not None
        self.here = config.num_moe_experts // self.ep
        self.top_k, self.fused = config.moe_router_topk, config.moe_permute_fusion

    def __call__(self, experts: Experts, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return for each token the sum of what its experts make of it: [T, hidden].

        experts: this rank's; under etp they give its share. tokens: [T, hidden]. weights: [T, experts], 0 or more. chosen: the same as
        bool, top_k a token.
        """
        parts = [x.tensor_split(self.parts) for x in (tokens, weights, chosen)]
        ranks = [part.view(-1, self.ep, self.here).any(-1) for part in parts[-1]]
        told = download(self._count(parts[-1], ranks))
        kind = _Stay if self.ep == 1 else _Trip
        trips = [kind(self, *part) for part in zip(*parts, ranks, strict=True)]  # while the counts come
        for trip, counts in zip(trips, self._read(told()), strict=True):
            trip.leave(counts)
        for trip in trips:
            trip.compute(experts)
        made = [trip.end() for trip in trips]
        return made[0] if len(made) == 1 else torch.cat(made)

    def _count(self, chosen: Sequence[Tensor], ranks: Sequence[Tensor]) -> Tensor:
        """Of each rank of the expert groups and each part: how many rows it sends to each rank of ep, then how many of its tokens chose each
        expert."""
        mine = torch.cat([one.sum(0) for pair in zip(ranks, chosen, strict=True) for one in pair])
        if self.ep * self.etp == 1:
            return mine
        every = mine.new_empty(self.ep * self.etp * len(mine))
        dist.all_gather_into_tensor(every, mine, group=self.groups.tp_ep)
        return every

    def _read(self, every: Tensor) -> list[_Counts]:
        """What `_count` says of this rank, a part each."""
        ep, etp = self.groups.ep.rank(), self.groups.expt_tp.rank()
        table = every.view(self.ep, self.etp, self.parts, -1)
        rows, tokens = table.split((self.ep, self.ep * self.here), -1)
        mine = tokens[..., ep * self.here : (ep + 1) * self.here].sum((0, 1))
        return [
            _Counts(
                rows[ep, etp, part].tolist(),
                rows[:, etp, part, ep].tolist(),
                rows[:, :, part, ep].sum(0).tolist(),
                mine[part],
            )
            for part in range(self.parts)
        ]


class _Stay:
    """Tokens that go through the experts of their own rank, and of those that share them."""

    def __init__(
        self, where: Dispatcher, tokens: Tensor, weights: Tensor, chosen: Tensor, ranks: Tensor
    ) -> None:
        """ranks: [T, ep] which tokens go where."""
        self._where, self._rows, self._marks = where, tokens, weights.where(chosen, NOT_CHOSEN)

    def leave(self, counts: _Counts) -> None:
        """Begin the way to the experts."""
        self._counts = counts

    def compute(self, experts: Experts) -> None:
        """Arrive, compute, and begin the way back with one row for each that came."""
        where, counts, rows, marks = self._where, self._counts, self._rows, self._marks
        if where.etp > 1:
            rows, marks = (
                gather_from_sequence_parallel_region(
                    x, group=where.groups.expt_tp, output_split_sizes=counts.of_etp
                )
                for x in (rows, marks)
            )
        if where.here == 1:  # each row is for it
            rows, _ = experts(rows, counts.per_expert, marks[:, 0])
        else:
            # A weight that is no number goes on as one that was chosen, to be told of as a gradient.
            here = marks != NOT_CHOSEN
            place = _places(here, int(counts.per_expert.sum()))
            order, tokens = _Order.of(rows, here, place, where.fused)
            made, _ = experts(tokens, counts.per_expert, marks.t().reshape(-1).index_select(0, place))
            rows = order.back(made)
        if where.etp > 1:
            summed = reduce_scatter_to_sequence_parallel_region(
                rows.to(torch.promote_types(rows.dtype, torch.float32)),
                group=where.groups.expt_tp,
                input_split_sizes=counts.of_etp,
            )
            rows = summed.to(rows.dtype)
        self._rows = rows

    def end(self) -> Tensor:
        """Be back: [T, hidden]."""
        return self._rows


class _Trip(_Stay):
    """Tokens that travel to the ranks of their experts and back."""

    def __init__(
        self, where: Dispatcher, tokens: Tensor, weights: Tensor, chosen: Tensor, ranks: Tensor
    ) -> None:
        """Put them in the order of their ranks."""
        super().__init__(where, tokens, weights, chosen, ranks)
        # At most: how many are known once the counts have come.
        place = _places(ranks, len(tokens) * min(where.ep, where.top_k))
        self._by_rank, self._rows = _Order.of(tokens, ranks, place, where.fused)
        marks = self._marks.view(-1, where.ep, where.here).transpose(0, 1).reshape(-1, where.here)
        self._marks = marks.index_select(0, place)

    def leave(self, counts: _Counts) -> None:
        super().leave(counts)
        self._away = [_Travel(self._where.groups.ep, counts.sent, counts.received) for _ in range(2)]
        self._rows, self._marks = self._away[0].start(self._rows), self._away[1].start(self._marks)

    def compute(self, experts: Experts) -> None:
        self._rows, self._marks = self._away[0].arrive(self._rows), self._away[1].arrive(self._marks)
        super().compute(experts)
        self._home = _Travel(self._where.groups.ep, self._counts.received, self._counts.sent)
        self._rows = self._home.start(self._rows)

    def end(self) -> Tensor:
        return self._by_rank.back(self._home.arrive(self._rows))


class _Travel:
    """Rows to each rank of a group and from each, between `start` and `arrive`; in backward gradients start where rows arrived."""

    def __init__(self, group: Any, sent: list[int], received: list[int]) -> None:
        self._group, self.sent, self.received, self.rows = group, sent, received, 0

    def start(self, x: Tensor) -> Tensor:
        """Return what will be there. x may be longer than what is sent; the gradient of the rest is 0."""
        return _Start.apply(x, self)

    def arrive(self, x: Tensor) -> Tensor:
        """Return what `start` returned, there."""
        return _Arrive.apply(x, self)

    def begin(self, x: Tensor, sent: list[int], received: list[int], rows: int) -> Tensor:
        """Queue the exchange; what is returned is as long as `rows`, at least."""
        end = sum(received)
        out = x.new_empty(max(rows, end), *x.shape[1:])
        out[end:] = 0
        given = x[: sum(sent)].contiguous()
        work = dist.all_to_all_single(out[:end], given, received, sent, group=self._group, async_op=True)
        self._under_way = work, given, out
        return out

    def finish(self) -> Tensor:
        """Have what is queued from now on wait for it, and return it."""
        work, _, out = self._under_way
        del self._under_way
        work.wait()
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Travel) -> Tensor:
        ctx.way, way.rows = way, len(x)
        return way.begin(x, way.sent, way.received, 0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.way.finish(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Travel) -> Tensor:
        ctx.way = way
        way.finish()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.way.begin(grad, ctx.way.received, ctx.way.sent, ctx.way.rows)
        return grad, None  # only a way for autograd to come to `_Start`, which has the real one
