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

TOP_K, HIDDEN = 3, 5
TOKENS = [9, 0, 14, 1]
"""Of each rank: the second has none of its own, and still has experts."""


def weights_of(experts: int, etp: int) -> Tensor:
    """What each expert multiplies with, a share for each rank of etp: [experts, etp, hidden, hidden]."""
    return torch.randn(
        experts, etp, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )


def tokens_of(rank: int, experts: int, few: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights (of each token's first choice exactly 0) and choices of a rank. few: all choose of the first four experts."""
    generator = torch.Generator().manual_seed(rank)
    n = TOKENS[rank]
    scores = torch.rand(n, experts, generator=generator, dtype=torch.float64)
    if few:
        scores[:, 4:] = 0
    top = scores.topk(TOP_K, -1).indices
    chosen = torch.zeros(n, experts, dtype=torch.bool).scatter_(1, top, True)
    weights = torch.rand(n, experts, generator=generator, dtype=torch.float64) * chosen
    weights = weights.scatter(1, top[:, :1], 0.0)
    return torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64), weights, chosen


def expected(rank: int, experts: int, few: bool, etp: int) -> tuple[Tensor, Tensor, Tensor]:
    """What every token becomes, and the gradients of tokens and weights, one expert after another in this process."""
    tokens, weights, chosen = tokens_of(rank, experts, few)
    tokens.requires_grad_()
    weights.requires_grad_()
    out = torch.zeros_like(tokens)
    for e, shares in enumerate(weights_of(experts, etp)):
        of_expert = sum((tokens @ share).tanh() for share in shares)
        out = out + of_expert * weights[:, e : e + 1] * chosen[:, e : e + 1]
    (out * torch.arange(HIDDEN)).sum().backward()
    assert tokens.grad is not None
    assert weights.grad is not None
    return out.detach(), tokens.grad, weights.grad


Log = list[tuple[str, list[int]]]


@contextlib.contextmanager
def logged() -> Iterator[Log]:
    """What begins, with the rows that leave for each rank of ep, and what is waited for, inside."""
    from quintet.engine.layers.dispatch import _Travel

    real, finish = dist.all_to_all_single, _Travel.finish
    log: Log = []

    def exchange(out: Tensor, given: Tensor, received: Any, leave: Any, **how: Any) -> Any:
        log.append(("begin", leave))
        return real(out, given, received, leave, **how)

    def waited(way: Any) -> Tensor:
        log.append(("wait", []))
        return finish(way)

    with (
        mock.patch.object(dist, "all_to_all_single", exchange),
        mock.patch.object(_Travel, "finish", waited),
    ):
        yield log


def dispatched(
    ep: int, etp: int, experts: int, few: bool, parts: int, lost: bool = False
) -> tuple[Log, list[Tensor]]:
    """On one rank of ep · etp: what happened, and what `expected` returns. lost: the last weight that counts is no number."""
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
    config: Any = SimpleNamespace(num_moe_experts=experts, moe_router_topk=TOP_K, moe_permute_fusion=False)
    dispatcher = Dispatcher(config, groups)
    dispatcher.parts = parts
    here, share = experts // ep, groups.expt_tp.rank()
    matrices = weights_of(experts, etp)[groups.ep.rank() * here :][:here, share]
    met: list[int] = []

    def compute(rows: Tensor, per_expert: Tensor, of_each: Tensor) -> tuple[Tensor, None]:
        log.append(("experts", []))
        met.append(int(per_expert.sum()))
        assert met[-1] == len(rows) == len(of_each)
        if rows.requires_grad:
            rows.register_hook(lambda _: log.append(("experts", [])))
        cut = zip(*(x.split(per_expert.tolist()) for x in (rows, of_each)), matrices, strict=True)
        return torch.cat([(one @ matrix).tanh() * weight[:, None] for one, weight, matrix in cut]), None

    tokens, weights, chosen = tokens_of(rank, experts, few)
    if lost and len(tokens):
        weights[-1, chosen[-1].nonzero()[-1]] = torch.nan
    tokens.requires_grad_()
    weights.requires_grad_()
    with logged() as log:
        out = dispatcher(compute, tokens, weights, chosen)
        (out * torch.arange(HIDDEN)).sum().backward()
    assert len(met) == parts
    assert tokens.grad is not None
    assert weights.grad is not None
    return log, [out.detach(), tokens.grad, weights.grad * chosen]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("few", [False, True], ids=["", "few"])
@pytest.mark.parametrize(
    ("ep", "etp", "experts"), [(1, 1, 8), (2, 1, 8), (4, 1, 8), (4, 1, 4), (1, 2, 8), (2, 2, 8)]
)
def test_tokens_come_back_as_the_sums_of_their_experts(
    pool: Any, ep: int, etp: int, experts: int, few: bool, parts: int
) -> None:
    for rank, (log, found) in enumerate(pool.run(dispatched, ep * etp, ep, etp, experts, few, parts)):
        for one, want in zip(found, expected(rank, experts, few, etp), strict=True):
            torch.testing.assert_close(one, want)
        sent = [leaving for what, leaving in log if what == "begin"]
        if ep == 1:
            assert not sent
            continue
        # Rows and weights there, rows back, and the same in backward.
        assert len(sent) == 6 * parts
        ranks = tokens_of(rank, experts, few)[2].view(-1, ep, experts // ep).any(-1)
        out = [sum(leaving) for leaving in zip(*sent[: 2 * parts : 2], strict=True)]
        assert out == ranks.sum(0).tolist()
        if TOKENS[rank] > 1 and experts > ep > 2:
            assert sum(out) < TOKENS[rank] * TOP_K  # fewer rows than one for each choice


def test_one_half_travels_while_the_other_is_computed(pool: Any) -> None:
    """There: both begin before the first is computed, the first's way back before the second is; in backward likewise."""
    for log, _ in pool.run(dispatched, 2, 2, 1, 8, False, 2):
        done = "".join(what[0] for what, _ in log)  # (b)egin, (w)ait, (e)xperts
        there, back = "bbbb" + "wwe" + "b" + "wwe" + "b" + "ww", "bb" + "we" + "bb" + "we" + "bb" + "wwww"
        assert done == there + back


def test_a_weight_that_is_no_number_spoils_its_own_token_alone(pool: Any) -> None:
    """And stays to be told of: as any other, where it is that an expert's output is multiplied."""
    for rank, (_, (out, _, _)) in enumerate(pool.run(dispatched, 2, 2, 1, 8, False, 1, True)):
        want = expected(rank, 8, False, 1)[0]
        torch.testing.assert_close(out[:-1], want[:-1])
        assert out[-1:].isnan().all()
