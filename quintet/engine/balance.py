"""How evenly the experts of each layer are used, and what evens it out.

Counted are the tokens of a mini-batch that its routers send to each expert: those of samples, prompts included, once each, over
all ranks. Padding, micro-batches of padding alone and what is computed again in backward never count. What counts is where a token
went, also where its route was prescribed. Layers for multi-token prediction are left as they are. Numbers so defined depend on no
packing, and on no layout.

The part of a micro-batch belongs to the row (`PackedRow.load`), as its routes do: backward may come to an older micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.engine.device import upload
from quintet.engine.routes import Routers
from quintet.models import ModelShape

if TYPE_CHECKING:  # it has a field for what is here
    from quintet.engine.row import MicroBatch


@dataclass
class RowLoad:
    """What routers of these layers do with one micro-batch on this rank. there: bool [T], which of their tokens are of samples."""

    layers: Sequence[int]
    there: Tensor
    counts: dict[int, Tensor] = field(default_factory=dict)
    """By layer, the tokens [experts] sent to each."""

    def take(self, layer: int, chosen: Tensor) -> None:
        """Count what a router chose. chosen: bool [T, experts]."""
        if layer in self.layers and layer not in self.counts:  # the second time is recomputation
            self.counts[layer] = (chosen & self.there[:, None]).sum(0)


class Load:
    """The load of experts in one pass over a mini-batch."""

    def __init__(self, shape: ModelShape) -> None:
        assert shape.moe is not None
        self._sizes = shape.layers, shape.moe.experts
        self._rows: list[RowLoad] = []

    def next(self, micro: MicroBatch, routers: Routers) -> RowLoad:
        """Return the next micro-batch's."""
        there = micro.real.chunk(routers.slices)[routers.part]
        self._rows.append(RowLoad(routers.layers, upload(there, routers.device)))
        return self._rows[-1]

    def counts(self, device: torch.device) -> Tensor:
        """Return the tokens [layers, experts] that this rank sent to each expert: int64, dense layers 0."""
        total = torch.zeros(self._sizes, dtype=torch.int64, device=device)
        for row in self._rows:
            for layer, counts in row.counts.items():
                total[layer] += counts
        return total


def load_metrics(counts: Tensor, layers: Iterable[int]) -> dict[str, float]:
    """Return what is logged of the counts [layers, experts] of a mini-batch: of each of these layers, the tokens of the busiest
    expert over the mean, and the experts without any; then the worst of the one, the sum of the other."""
    here = list(layers)
    found = counts[here].double()
    busiest = (found.amax(1) / found.mean(1).clamp(min=1e-9)).tolist()
    idle = (found == 0).sum(1).double().tolist()
    told = {"experts/load": max(busiest), "experts/idle": sum(idle)}
    for name, values in (("experts/load", busiest), ("experts/idle", idle)):
        told |= {f"{name}_{layer}": value for layer, value in zip(here, values, strict=True)}
    return told


@torch.no_grad()
def move_biases(routers: Iterable[Any], counts: Tensor, rate: float) -> None:
    """Add `rate` to the stored bias of each expert that got fewer tokens than the mean of its layer, and take it off where it got
    more (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2). counts: [layers, experts] over all ranks, so that copies
    stay equal; routers of other layers keep theirs."""
    for router in routers:
        layer = router.layer_number - 1
        if router.expert_bias is not None and layer < len(counts):
            here = counts[layer]
            lacking = here.sum() - len(here) * here  # in whole numbers: a tie is one on every machine
            router.expert_bias += rate * lacking.sign()
