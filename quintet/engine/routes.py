"""Routes: the experts that the tokens of a micro-batch are sent to, as routers are told them and as they choose.

megatron-core asks a router's `router_replay`, where it has one, which experts to take. Here what answers belongs to the row
(`PackedRow.routes`), which goes down to the router as an argument and stands there for one call alone: whatever is computed,
or computed again in backward, is answered for its own micro-batch. Only the choice is prescribed; the experts' weights are of
the scores that the router computes, and so are its gradients.

Layers are numbered from 0 through the model, dense ones counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.device import upload
from quintet.errors import QuintetError
from quintet.models.shape import route_bytes

if TYPE_CHECKING:  # it has a field for what is here
    from quintet.engine.row import MicroBatch


@dataclass
class RowRoutes:
    """The routes of one micro-batch in these layers of a rank; other routers choose by themselves.

    T tokens pass a router here: of the row this rank's part, of that under sequence parallelism its slice.
    prescribed: [T, layers, top-k] experts, of any integer type, in the order of `layers`; None prescribes nothing.
    prescribed_to: bool [T], to which of the tokens; the others choose by themselves.
    keep: what was chosen is kept in `heard`.
    """

    layers: Sequence[int]
    prescribed: Tensor | None = None
    prescribed_to: Tensor | None = None
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
            assert row.prescribed_to is not None
            natural, told = chosen, row.prescribed[:, row.layers.index(self.layer)]
            if told.shape != natural.shape:
                raise ValueError(
                    f"layer {self.layer}: routes {list(told.shape)} for choices {list(natural.shape)}"
                )
            chosen = torch.where(row.prescribed_to[:, None], told.long(), natural)
            values = scores.gather(1, chosen)
            parted = _differ(chosen, natural).sum()
        if self.layer not in row.parted:  # what is computed again in backward is not counted again
            row.parted[self.layer] = parted
            if row.keep:
                row.heard[self.layer] = chosen.to(expert_type(scores.shape[1]))
        return values, chosen


def expert_type(experts: int) -> torch.dtype:
    """Return the smallest type that holds the numbers of so many experts."""
    return torch.uint8 if route_bytes(experts) == 1 else torch.int16


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether two choices [T, top-k] are of other experts, in whatever order: bool [T]."""
    return ~(one[:, :, None] == other[:, None]).any(-1).all(-1)


class Routers(NamedTuple):
    """The routers of one rank's decoder: their layers, in order, and which of `slices` of a row they see; group: the ranks that see
    the others."""

    layers: tuple[int, ...]
    slices: int
    part: int
    device: torch.device
    group: dist.ProcessGroup | None = None


class Routes(ABC):
    """The routes of one pass over a mini-batch on one rank, whose micro-batches come in order. For one pass alone."""

    def __init__(self) -> None:
        self._rows: list[RowRoutes] = []

    def next(self, micro: MicroBatch, routers: Routers) -> RowRoutes:
        """Return the routes of the next micro-batch."""
        self._rows.append(self._row(len(self._rows), micro, routers))
        return self._rows[-1]

    def again(self) -> Routes:
        """Return the same for another pass over the same micro-batches."""
        other = copy(self)
        other._rows = []
        return other

    @abstractmethod
    def _row(self, number: int, micro: MicroBatch, routers: Routers) -> RowRoutes: ...

    def finish(self, routers: Routers) -> None:
        """Look back at the pass. Raises QuintetError where a router went by without having been answered."""
        for number, row in enumerate(self._rows):
            if missing := sorted(set(routers.layers) - set(row.parted)):
                raise QuintetError(
                    f"micro-batch {number}: routers of {len(routers.layers) - len(missing)} of {len(routers.layers)} layers with "
                    f"experts on this rank were told their routes, those of the layers {missing} were not"
                )

    def parted(self) -> dict[int, tuple[int, int]]:
        """Return of each layer how many tokens' own choice is another than was prescribed to them, and to how many it was."""
        rows = [row for row in self._rows if row.prescribed_to is not None]
        if not rows or not rows[0].layers:
            return {}
        layers = rows[0].layers
        counts = [
            torch.stack([cast(Tensor, row.prescribed_to).sum(), *(row.parted[layer] for layer in layers)])
            for row in rows
        ]
        tokens, *found = torch.stack(counts).sum(0).tolist()  # the one wait for the device
        return {layer: (count, tokens) for layer, count in zip(layers, found, strict=True)}


class RecordedRoutes(Routes):
    """What tokens choose by themselves, kept on this rank by micro-batch, to be replayed in passes over the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        """Of each micro-batch, [T, layers, top-k] on the CPU."""

    def _row(self, number: int, micro: MicroBatch, routers: Routers) -> RowRoutes:
        return RowRoutes(routers.layers, keep=True)

    def finish(self, routers: Routers) -> None:
        """Look back at the pass, and keep what was heard."""
        super().finish(routers)
        for row in self._rows:
            heard = [row.heard[layer] for layer in routers.layers]
            self.kept.append(torch.stack(heard, 1).cpu() if heard else torch.empty(0))
        self._rows = []


class ReplayedRoutes(Routes):
    """What was recorded in an earlier pass over the same micro-batches is prescribed. Padding chooses by itself."""

    def __init__(self, record: RecordedRoutes) -> None:
        super().__init__()
        self._kept = record.kept

    def _row(self, number: int, micro: MicroBatch, routers: Routers) -> RowRoutes:
        real = micro.real.chunk(routers.slices)[routers.part]
        told = upload(self._kept[number], routers.device)
        return RowRoutes(routers.layers, told, upload(real, routers.device))


class BatchRoutes(Routes):
    """What a rollout told is prescribed. Padding, and tokens that it tells no routes of, choose by themselves.

    told: of a batch's tokens, jagged [samples, j, layers, top-k], for the layers with experts on this rank, in their order. None
    where this rank has no samples, but padding alone.
    """

    def __init__(self, told: Tensor | None) -> None:
        super().__init__()
        self._told = told

    def _row(self, number: int, micro: MicroBatch, routers: Routers) -> RowRoutes:
        if self._told is None:
            return RowRoutes(routers.layers)
        if self._told.shape[2] != len(routers.layers):
            raise ValueError(
                f"routes of {self._told.shape[2]} layers for a rank that has experts in the layers {list(routers.layers)}"
            )
        told, known = micro.cut(self._told, 0, routers.slices, routers.part)
        return RowRoutes(routers.layers, upload(told, routers.device), upload(known, routers.device))
