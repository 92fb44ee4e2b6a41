"""What `tests.oracle.mistakes` does wrong about the load of experts."""

from __future__ import annotations

from typing import Any

import torch


def padding_counted(original: Any, *args: Any) -> Any:
    row = original(*args)
    row.there = torch.ones_like(row.there)
    return row


def first_slice(original: Any, load: Any, micro: Any, routers: Any) -> Any:
    """The mask is cut by context parallelism, and not by sequence parallelism."""
    return original(load, micro, routers._replace(part=0))


def recomputation_counted(original: Any, row: Any, layer: int, *args: Any) -> Any:
    before = row.counts.pop(layer, 0)
    out = original(row, layer, *args)
    row.counts[layer] = row.counts[layer] + before
    return out


def own_counts(original: Any, engine: Any, counts: torch.Tensor) -> torch.Tensor:
    """Of one dp rank: the others' are replaced."""
    torch.distributed.all_reduce(counts, group=engine.mesh.groups.mp)
    return counts


def moved_before(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """The bias moves as a mini-batch begins, by what it was before it: forward and backward meet another than the last step left. (Fast enough that no token of these is too far from a tie.)"""
    from quintet.engine.balance import move_biases
    from quintet.engine.layers.router import Router

    result = original(engine, *args, **kwargs)
    routers = [m for chunk in engine.chunks for m in chunk.modules() if isinstance(m, Router)]
    move_biases(routers, engine._counts, 50 * engine.recipe.expert_bias_rate)
    result = original(engine, *args, **kwargs)
    move_biases(routers, engine._counts, -50 * engine.recipe.expert_bias_rate)
    return result


def other_way(original: Any, routers: Any, counts: torch.Tensor, rate: float) -> None:
    """Up where there is much."""
    original(routers, counts, -rate)
