"""Which rank of a layout writes which part of a parameter, where each part is written once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from quintet.errors import UserError
from quintet.models import ModelShape, Weight
from quintet.recipe.rules.experts import expert_axes_need_experts, experts_divide
from quintet.recipe.rules.facts import Facts
from quintet.recipe.rules.layout import model_divides, stages_hold_the_layers, vpp_needs_pp
from quintet.recipe.schema import Cluster, Layout, Model, Recipe

Part = tuple[int, int]
"""(rank, size) on an axis."""


class Places:
    """The smallest layout with the given sizes: context and data parallelism add copies, and copies write nothing."""

    def __init__(self, shape: ModelShape, layout: Layout) -> None:
        self._shape, self._layout = shape, layout
        self._etp = layout.expert_tp
        experts = layout.ep * self._etp if shape.moe else 1
        self._stage_ranks = math.lcm(layout.tp, experts)
        self.ranks = self._stage_ranks * layout.pp
        self._stages = {
            layer: stage
            for stage in range(layout.pp)
            for chunk in layout.layers_of(shape.layers, stage)
            for layer in chunk
        }

    def check(self) -> None:
        """Raise UserError in the words of the command line for sizes that the model does not divide by."""
        recipe = Recipe(model=Model(), layout=self._layout, cluster=Cluster(ranks=self.ranks))
        facts = Facts(recipe, "train", self._shape)
        for rule in (
            vpp_needs_pp,
            model_divides,
            stages_hold_the_layers,
            expert_axes_need_experts,
            experts_divide,
        ):
            for problem in rule(facts):
                raise UserError(problem.message.replace("layout.", "--"))

    def of(self, weight: Weight) -> Iterator[tuple[int, Part, Part]]:
        """Yield ranks that write parts of a weight, with their places on the axes tp and etp."""
        tp, etp = self._layout.tp, self._etp
        first = self._stage(weight.name) * self._stage_ranks
        if weight.split.startswith("expert_"):
            assert self._shape.moe is not None
            found = re.search(r"\.experts\.(\d+)\.", weight.name)
            assert found is not None
            ep = int(found[1]) // (self._shape.moe.experts // self._layout.ep)
            for at in range(1 if weight.split == "expert_replicated" else etp):
                yield first + ep * etp + at, (0, tp), (at, etp)
        else:
            for at in range(1 if weight.split == "replicated" else tp):
                yield first + at, (at, tp), (0, etp)

    def _stage(self, name: str) -> int:
        if name.startswith("embedding."):
            return 0
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        if layer is None:
            return self._layout.pp - 1
        return self._stages[int(layer[1])]
