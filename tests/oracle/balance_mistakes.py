"""What `tests.oracle.mistakes` does wrong about the load of experts and about frozen weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch


def padding_counted(original: Any, *args: Any) -> Any:
    row = original(*args)
    row.real = torch.ones_like(row.real)
    return row


def first_slice(original: Any, load: Any, micro: Any, routers: Any, group: Any) -> Any:
    """The mask is cut by context parallelism, and not by sequence parallelism."""
    return original(load, micro, routers._replace(part=0), group)


def recomputation_counted(original: Any, row: Any, layer: int, *args: Any) -> Any:
    row.shares.pop(layer, None)
    return original(row, layer, *args)


def own_counts(original: Any, engine: Any, counts: torch.Tensor) -> torch.Tensor:
    """Of one dp rank: the others' are replaced."""
    torch.distributed.all_reduce(counts, group=engine.mesh.groups.mp)
    return counts


def moved_before(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """The bias moves as a mini-batch begins, by what it was before it: forward and backward meet another than the last step left. (Fast enough that no token of these is too far from a tie.)"""
    result = original(engine, *args, **kwargs)
    _move(engine, 50)
    result = original(engine, *args, **kwargs)
    _move(engine, -50)
    return result


def moved_first(original: Any, engine: Any) -> Any:
    """The bias moves and then the optimizer steps, as in megatron-core: weights are the same, but where the step is not taken."""
    _move(engine, 1)
    with mock.patch("quintet.engine.engine.move_biases"):
        return original(engine)


def _move(engine: Any, times: float) -> None:
    from quintet.engine.balance import move_biases
    from quintet.engine.layers.router import Router

    routers = [m for chunk in engine.chunks for m in chunk.modules() if isinstance(m, Router)]
    move_biases(routers, engine._counts[:, :-2], times * engine.recipe.expert_bias_rate)


def other_way(original: Any, routers: Any, counts: torch.Tensor, rate: float) -> None:
    """Up where there is much."""
    original(routers, counts, -rate)


def own_tokens(original: Any, engine: Any, batch: Any, cells: Any, *args: Any) -> Any:
    """Losses are divided by the tokens and samples of one rank."""
    load = original(engine, batch, cells, *args)
    mine = [int(load.losses.lengths[i]) for cell in cells for i in cell.samples]
    load.losses = replace(load.losses, tokens=max(sum(mine), 1), samples=max(len(mine), 1))
    return load


def own_part(original: Any, *args: Any) -> Any:
    """A sample's counts are of the part of the row that a rank has."""
    row = original(*args)
    row.groups = []
    return row


def counts_by_position(original: Any, *args: Any) -> Any:
    """The loss per batch takes the next expert's count."""
    load = original(*args)
    load.losses = replace(load.losses, counts=load.losses.counts.roll(1, -1))
    return load


def padded_lengths(original: Any, *args: Any) -> Any:
    """A sample has the tokens that it is padded to."""
    row = original(*args)
    row.lengths = (row.lengths / 4).ceil() * 4
    return row


def losses_on_padding(original: Any, row: Any, *args: Any) -> Any:
    real, row.real = row.real, torch.ones_like(row.real)
    try:
        return original(row, *args)
    finally:
        row.real = real


def not_required(original: Any, module: Any, arguments: Any, out: torch.Tensor) -> torch.Tensor:
    return out
