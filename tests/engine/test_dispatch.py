"""Tokens reach the ranks of their experts once each, and come back as the sums of what these made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

EXPERTS, TOP_K, HIDDEN = 8, 3, 5
TOKENS = [9, 0, 14, 1]
"""Of each rank: the second has none of its own, and still has experts."""


def weights_of(etp: int) -> Tensor:
    """What each expert multiplies with, a share for each rank of etp: [experts, etp, hidden, hidden]."""
    return torch.randn(
        EXPERTS, etp, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )


def tokens_of(rank: int, few: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights (of each token's first choice exactly 0) and choices of a rank. few: all choose of the first four experts."""
    generator = torch.Generator().manual_seed(rank)
    n = TOKENS[rank]
    scores = torch.rand(n, EXPERTS, generator=generator, dtype=torch.float64)
    if few:
        scores[:, 4:] = 0
    top = scores.topk(TOP_K, -1).indices
    chosen = torch.zeros(n, EXPERTS, dtype=torch.bool).scatter_(1, top, True)
    weights = torch.rand(n, EXPERTS, generator=generator, dtype=torch.float64) * chosen
    weights = weights.scatter(1, top[:, :1], 0.0)
    return torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64), weights, chosen


def expected(rank: int, few: bool, etp: int) -> tuple[Tensor, Tensor, Tensor]:
    """What every token becomes, and the gradients of tokens and weights, one expert after another in this process."""
    tokens, weights, chosen = tokens_of(rank, few)
    tokens.requires_grad_()
    weights.requires_grad_()
    out = torch.zeros_like(tokens)
    for e, shares in enumerate(weights_of(etp)):
        of_expert = sum((tokens @ share).tanh() for share in shares)
        out = out + of_expert * weights[:, e : e + 1] * chosen[:, e : e + 1]
    (out * torch.arange(HIDDEN)).sum().backward()
    assert tokens.grad is not None
    assert weights.grad is not None
    return out.detach(), tokens.grad, weights.grad


@contextlib.contextmanager
def counted() -> Iterator[list[list[int]]]:
    """How many rows leave for each rank of ep, a list of its own for each exchange inside."""
    real = dist.all_to_all_single
    sent: list[list[int]] = []

    def exchange(out: Tensor, given: Tensor, received: Any, leave: Any, **how: Any) -> Any:
        sent.append(leave)
        return real(out, given, received, leave, **how)

    with mock.patch.object(dist, "all_to_all_single", exchange):
        yield sent


def dispatched(ep: int, etp: int, few: bool, parts: int) -> tuple[list[list[int]], list[Tensor]]:
    """On one rank of ep · etp: rows sent to each rank of ep, an exchange each, and what `expected` returns."""
    from quintet.engine import megatron_compat

    megatron_compat.install()
    from quintet.engine.layers.dispatch import Dispatcher

    rank = dist.get_rank()
    grid = torch.arange(ep * etp).view(ep, etp)

    def mine(rows: list[list[int]]) -> Any:
        made = [dist.new_group(row) for row in rows]
        return next(one for one, row in zip(made, rows, strict=True) if rank in row)

    groups: Any = SimpleNamespace(
        ep=mine(grid.t().tolist()), expt_tp=mine(grid.tolist()), tp_ep=mine([grid.flatten().tolist()])
    )
    config: Any = SimpleNamespace(num_moe_experts=EXPERTS, moe_router_topk=TOP_K, moe_permute_fusion=False)
    dispatcher = Dispatcher(config, groups)
    dispatcher.parts = parts
    here, share = EXPERTS // ep, groups.expt_tp.rank()
    matrices = weights_of(etp)[groups.ep.rank() * here :][:here, share]
    met: list[int] = []

    def experts(rows: Tensor, per_expert: Tensor, of_each: Tensor) -> tuple[Tensor, None]:
        met.append(int(per_expert.sum()))
        assert met[-1] == len(rows) == len(of_each)
        cut = zip(*(x.split(per_expert.tolist()) for x in (rows, of_each)), matrices, strict=True)
        return torch.cat([(one @ matrix).tanh() * weight[:, None] for one, weight, matrix in cut]), None

    tokens, weights, chosen = tokens_of(rank, few)
    tokens.requires_grad_()
    weights.requires_grad_()
    with counted() as sent:
        out = dispatcher(experts, tokens, weights, chosen)
        (out * torch.arange(HIDDEN)).sum().backward()
    assert len(met) == parts
    assert tokens.grad is not None
    assert weights.grad is not None
    return sent, [out.detach(), tokens.grad, weights.grad * chosen]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("few", [False, True], ids=["", "few"])
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_tokens_come_back_as_the_sums_of_their_experts(
    pool: Any, ep: int, etp: int, few: bool, parts: int
) -> None:
    for rank, (sent, found) in enumerate(pool.run(dispatched, ep * etp, ep, etp, few, parts)):
        for one, want in zip(found, expected(rank, few, etp), strict=True):
            torch.testing.assert_close(one, want)
        if ep == 1:
            assert not sent
            continue
        # Rows and weights there, rows back, and the same in backward.
        assert len(sent) == 6 * parts
        ranks = tokens_of(rank, few)[2].view(-1, ep, EXPERTS // ep).any(-1)
        out = [sum(leaving) for leaving in zip(*sent[: 2 * parts : 2], strict=True)]
        assert out == ranks.sum(0).tolist()
        assert TOKENS[rank] < 2 or sum(out) < TOKENS[rank] * TOP_K  # fewer rows than one for each choice
