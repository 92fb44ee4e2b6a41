"""Context parallelism: what the ranks that share a row tell each other so that each can attend.

Each rank holds its zigzag chunks of every sequence (`quintet.packing.context`). Two ways:

AllGather: keys and values of the whole row are gathered; a rank's chunks of queries attend to the sequence up to
their ends. Works with any number of heads. (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2)

AllToAll: tokens are exchanged for heads; each rank attends with its share of the heads over whole sequences.
(DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509)

The group comes with the row, so it may differ from micro-batch to micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class AllGather:
    """An exchange that gathers keys and values. keys: [K] positions, in the gathered row, of what the held chunks see. early,
    late: which of the K the earlier and the later chunks of the sequences see; within either a position occurs once."""

    group: dist.ProcessGroup
    keys: Tensor
    early: Tensor
    late: Tensor

    def before(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gather keys and values: query [T / cp, heads, d] stays; key and value [T / cp, kv heads, …] become [K, kv heads, …]."""
        key, value = _GatherKeys.apply(key, value, self)
        return query, key, value

    def after(self, context: Tensor) -> Tensor:
        """Return what was attended as it is."""
        return context

    def of_heads(self, values: Tensor) -> Tensor:
        """Return values a head [heads] as they are: this rank attends with all heads."""
        return values


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, plan: AllGather) -> tuple[Tensor, Tensor]:
        both = torch.cat((key, value), -1)  # one collective for both
        full = both.new_empty((plan.group.size() * len(both), *both.shape[1:]))
        dist.all_gather_into_tensor(full, both, group=plan.group)
        ctx.plan, ctx.tokens = plan, len(both)
        width = key.shape[-1]
        return full[..., :width].index_select(0, plan.keys), full[..., width:].index_select(0, plan.keys)

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> Any:
        plan: AllGather = ctx.plan
        grad = torch.cat((grad_key, grad_value), -1)
        full = grad.new_zeros((plan.group.size() * ctx.tokens, *grad.shape[1:]))
        # A key is seen by one chunk or by two. Kind by kind no position repeats: the sum has one order.
        for kind in (plan.early, plan.late):
            full.index_add_(0, plan.keys.index_select(0, kind), grad.index_select(0, kind))
        mine = grad.new_empty((ctx.tokens, *grad.shape[1:]))
        dist.reduce_scatter_tensor(mine, full, group=plan.group)
        width = grad_key.shape[-1]
        return mine[..., :width], mine[..., width:], None


@dataclass
class AllToAll:
    """An exchange of heads for tokens. order: [T] for each row position, where it lies once the ranks' parts stand one after
    another."""

    group: dist.ProcessGroup
    order: Tensor

    def __post_init__(self) -> None:
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(len(self.order), device=self.order.device)

    def before(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange tokens for heads: [T / cp, heads, d] each → [T, heads / cp, d], in row order."""
        ranks = self.group.size()
        parts = [t.reshape(len(t), ranks, -1) for t in (query, key, value)]
        rows = _Swap.apply(torch.cat(parts, -1).transpose(0, 1), self.group).flatten(0, 1)
        rows = _Permute.apply(rows, self.order, self.back)
        pieces = rows.split([p.shape[-1] for p in parts], -1)
        q, k, v = (
            piece.reshape(len(rows), t.shape[1] // ranks, t.shape[2])
            for piece, t in zip(pieces, (query, key, value), strict=True)
        )
        return q, k, v

    def after(self, context: Tensor) -> Tensor:
        """Exchange heads for tokens: [T, heads / cp, d] in row order → [T / cp, heads, d]."""
        ranks, d = self.group.size(), context.shape[-1]
        rows = _Permute.apply(context.flatten(1), self.back, self.order)
        mine = _Swap.apply(rows.view(ranks, len(rows) // ranks, -1), self.group)
        return mine.transpose(0, 1).reshape(len(rows) // ranks, -1, d)

    def of_heads(self, values: Tensor) -> Tensor:
        """Return, of values a head [heads], those of the heads that this rank attends with."""
        return values.chunk(self.group.size())[self.group.rank()]


Exchange = AllGather | AllToAll
"""An exchange between context-parallel ranks: before the kernel, every rank's part of q, k and v becomes what this rank attends with;
after it, the way back."""


class _Swap(torch.autograd.Function):
    """[ranks, …]: part i goes to rank i, and rank i's part takes its place. Its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Swap.apply(grad, ctx.group), None


class _Permute(torch.autograd.Function):
    """rows[order], whose gradient is a permutation too: no scattered additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def gather_places(values: Tensor, place: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """Return what the ranks know of a row's `count` trained tokens, put together: the same [..., count] on each of them.

    values: [..., M] of the tokens at `place` [M]; every token has one rank. Each rank computes the same loss from the
    result, so the gradient of a value is what its own rank's loss says: nothing is summed.
    """
    return _GatherPlaces.apply(values, place, count, group)


class _GatherPlaces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, place: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(place)
        out = values.new_zeros((*values.shape[:-1], count))
        out[..., place] = values
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[..., ctx.saved_tensors[0]], None, None, None
