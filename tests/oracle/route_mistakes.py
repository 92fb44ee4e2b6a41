"""What `tests.oracle.mistakes` does wrong about routes that are replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch


def told(original: Any, change: Callable[[torch.Tensor], torch.Tensor], *args: Any) -> Any:
    """Routes of a row with `change` made to those that are prescribed."""
    row = original(*args)
    row.prescribed = change(row.prescribed)
    return row


def one_late(original: Any, *args: Any) -> Any:
    return told(original, lambda told: told.roll(1, 0), *args)


def dense_counted(original: Any, *args: Any) -> Any:
    """A rollout's layers are those with experts, and are found by their numbers in the model."""
    return told(original, lambda told: told.roll(-1, 1), *args)


def other_slice(original: Any, routes: Any, number: int, micro: Any, routers: Any) -> Any:
    return original(routes, number, micro, routers._replace(part=routers.slices - 1 - routers.part))


def in_stripes(original: Any, micro: Any, *args: Any) -> Any:
    """A field is cut into one stripe of each sequence a rank, where ids are cut in zigzag."""
    held = [torch.arange(n // micro.cp) + micro.cp_rank * (n // micro.cp) for n in micro.lengths]
    return original(replace(micro, positions=torch.cat(held)), *args)


_NEWEST: dict[int, Any] = {}


def newest(original: Any, row: Any, layer: int) -> Any:
    """What is computed again is told the routes of the micro-batch that passed last."""
    if layer not in row.parted:
        _NEWEST[layer] = row
        return original(row, layer)
    other = _NEWEST[layer]
    at = torch.arange(len(row.prescribed)) % len(other.prescribed)
    return original(
        replace(row, prescribed=other.prescribed[at], prescribed_to=other.prescribed_to[at]), layer
    )


def anew(original: Any, routes: Any, number: int, micro: Any, routers: Any) -> Any:
    """The record is that of what tokens choose by now."""
    row = original(routes, number, micro, routers)
    row.prescribed_to = torch.zeros_like(row.prescribed_to)
    return row


def eaten(original: Any, routes: Any, number: int, micro: Any, routers: Any) -> Any:
    """A row of padding before all others has taken the first record."""
    row, other = (original(routes, n, micro, routers) for n in (number, (number + 1) % len(routes._kept)))
    row.prescribed = other.prescribed[torch.arange(len(row.prescribed)) % len(other.prescribed)]
    return row


def weights_replayed(original: Any, *args: Any) -> Any:
    values, chosen = original(*args)
    return values.detach(), chosen


def in_order_of_weight(original: Any, *args: Any) -> Any:
    """The first expert that is told is taken for the heaviest."""
    values, chosen = original(*args)
    return values.sort(-1, descending=True).values, chosen


def ahead_too(original: Any, row: Any, layer: int) -> Any:
    """A drafting layer's router is answered as the last one of the model."""
    return original(row, min(layer, row.layers[-1]))


def recorded_again(original: Any, layer: Any, scores: torch.Tensor, topk: int, *how: Any) -> Any:
    """What is computed again in backward chooses by itself, and that is the record from then on."""
    row = layer.row
    if row.prescribed is not None and layer.layer in row.parted:
        row.prescribed[:, row.layers.index(layer.layer)] = how[-1](scores, topk)[1]
    return original(layer, scores, topk, *how)


def of_reference(original: Any, training: Any, batch: int) -> Any:
    """The pass of a reference policy, of other weights, is told the record that the policy's has made, and keeps in it."""
    from quintet.engine import routes

    record = original(training, batch)
    routers = [p for n, p in training.engine.model.named_parameters() if n.endswith("router.weight")]
    before = [p.detach().clone() for p in routers]
    record.kept.clear()
    with mock.patch.object(routes, "RecordedRoutes", return_value=record), torch.no_grad():
        for p in routers:
            p.copy_(p.roll(1, 0))
        original(training, batch)
        for p, old in zip(routers, before, strict=True):
            p.copy_(old)
    return record
