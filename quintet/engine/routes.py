"""Routes: the experts that the tokens of a micro-batch are sent to, as routers are told them and as they choose.

megatron-core asks a router's `router_replay`, where it has one, which experts to take. Here what answers belongs to the row
(`PackedRow.routes`), which goes down to the router as an argument and stands there for one call alone: whatever is computed,
or computed again in backward, is answered for its own micro-batch. Only the choice is prescribed; the experts' weights are of
the scores that the router computes, and so are its gradients.

Layers are numbered from 0 through the model, dense ones counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class RowRoutes:
    """The routes of one micro-batch in these layers of a rank; other routers choose by themselves.

    T tokens pass a router here: of the row this rank's part, of that under sequence parallelism its slice.
    prescribed: [T, layers, top-k] experts, of any integer type, in the order of `layers`; None prescribes nothing.
    there: bool [T], to which of the tokens; the others choose by themselves.
    keep: what was chosen is kept in `heard`.
    """

    layers: Sequence[int]
    prescribed: Tensor | None = None
    there: Tensor | None = None
    keep: bool = False
    heard: dict[int, Tensor] = field(default_factory=dict)
    """By layer the experts [T, top-k] that tokens were sent to, in the smallest type that holds them."""
    parted: dict[int, Tensor] = field(default_factory=dict)
    """By layer that was asked, how many tokens would have chosen otherwise than was prescribed to them."""

    def of(self, layer: int) -> LayerRoutes | None:
        """Return what answers the router of this layer."""
        return LayerRoutes(self, layer) if layer in self.layers else None


@dataclass(frozen=True)
class LayerRoutes:
    """The answer to one router's question, under megatron-core's name for it."""

    row: RowRoutes
    layer: int

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Return what is chosen of scores [T, experts]: values and experts, [T, top-k] each. choose: the router's own way.

        Raises ValueError where what is prescribed is of other tokens or another top-k.
        """
        row = self.row
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        parted = torch.zeros((), dtype=torch.int64, device=scores.device)
        if row.prescribed is not None:
            assert row.there is not None
            natural, told = chosen, row.prescribed[:, row.layers.index(self.layer)]
            if told.shape != natural.shape:
                raise ValueError(
                    f"layer {self.layer}: routes {list(told.shape)} for choices {list(natural.shape)}"
                )
            chosen = torch.where(row.there[:, None], told.long(), natural)
            values = scores.gather(1, chosen)
            parted = _differ(chosen, natural).sum()
        if self.layer not in row.parted:  # what is computed again in backward is not counted again
            row.parted[self.layer] = parted
            if row.keep:
                row.heard[self.layer] = chosen.to(expert_type(scores.shape[1]))
        return values, chosen


def expert_type(experts: int) -> torch.dtype:
    """Return the smallest type that holds the numbers of so many experts."""
    return torch.uint8 if experts <= 256 else torch.int16


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether two choices [T, top-k] are of other experts, in whatever order: bool [T]."""
    return ~(one[:, :, None] == other[:, None]).any(-1).all(-1)
