"""Attention of ranks that share a row: what one rank says of the whole row, with a group of each row's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

SIZES = {
    "grouped heads": (8, 4, 16, 16, False),
    "narrow values": (4, 4, 24, 16, False),
    "windows and sinks": (8, 4, 16, 16, True),
}
ROWS = ([5, 1, 30, 8], [1], [17, 17, 17], [])
"""Lengths of samples; the last row is padding alone."""


def shared_attention(
    comm: str, heads: int, kv_heads: int, d: int, dv: int, far: bool
) -> list[tuple[int, float]]:
    """On each of 4 ranks: rows shared by 1, 2 and 4 ranks one after another. Returns (cp, worst error) of each.

    far: with a sliding window, and sinks, whose gradient is the sum over the ranks of a row.
    """
    from quintet.engine import megatron_compat

    megatron_compat.install()
    from quintet.engine.layers.attention import CoreAttention
    from quintet.engine.row import attention_metadata, pack
    from quintet.packing.align import alignment
    from quintet.packing.context import held_ranges

    rank, found = dist.get_rank(), []
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {1: None, 2: pairs[rank // 2], 4: dist.group.WORLD}
    alone = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    how: dict[str, Any] = {"window": 5, "sinks": True, "pg_collection": alone}
    config = SimpleNamespace(num_attention_heads=heads, params_dtype=None, use_cpu_initialization=True)
    attention = CoreAttention(config, 1, d**-0.5, **(how if far else {}))
    sinks = attention.softmax_offset
    if sinks is not None:
        torch.nn.init.normal_(sinks, generator=torch.Generator().manual_seed(9))
    for number, lengths in enumerate(ROWS):
        for cp, group in groups.items():
            ends = torch.tensor([0, *lengths]).cumsum(0)
            tokens = torch.arange(int(ends[-1]))
            trained = torch.ones(len(tokens), dtype=torch.bool)
            which = range(len(lengths))
            whole = pack(tokens, ends, trained, which, alignment(cp=cp))
            mine = pack(tokens, ends, trained, which, alignment(cp=cp), cp, rank % cp)
            held = torch.cat(
                [torch.arange(r.start, r.stop) for r in held_ranges(whole.lengths, cp, rank % cp)]
            )

            generator = torch.Generator().manual_seed(number)
            shapes = ((heads, d), (kv_heads, d), (kv_heads, dv), (heads, dv))
            *inputs, grad = (torch.randn(whole.tokens, *s, generator=generator) for s in shapes)
            full = [x.clone().requires_grad_() for x in inputs]
            want = attention(*full, attention_metadata(whole, torch.device("cpu"), rectangles=True))
            want.backward(grad)
            of_sinks = take_gradient(sinks)

            parts = [x[held].requires_grad_() for x in inputs]
            row = attention_metadata(mine, torch.device("cpu"), rectangles=True, group=group, comm=comm)
            got = attention(*parts, row)
            got.backward(grad[held])
            errors = [(got - want[held]).abs().max()]
            errors += [(a.grad - b.grad[held]).abs().max() for a, b in zip(parts, full, strict=True)]
            if sinks is not None:
                mine_alone = take_gradient(sinks)
                if group is not None:
                    dist.all_reduce(mine_alone, group=group)
                errors.append((mine_alone - of_sinks).abs().max())
            found.append((cp, max(e.item() for e in errors)))
    return found


def take_gradient(parameter: Any) -> Any:
    if parameter is None:
        return None
    gradient, parameter.grad = parameter.grad, None
    return gradient


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("comm", ["all_gather", "all_to_all"])
def test_each_row_may_have_its_own_group(pool: Any, comm, sizes) -> None:
    for found in pool.run(shared_attention, 4, comm, *sizes):
        assert [cp for cp, _ in found] == [1, 2, 4] * len(ROWS)
        for cp, error in found:
            assert error < 1e-5, cp
