"""What megatron-core's optimizers hold of each parameter, whichever optimizer it is: one description of all of them.

The distributed optimizer holds a slice of some parameters, the others whole ones; masters and moments of the hybrid one
(optimizer.cpu_fraction) are in optimizers within it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from quintet.recipe.schema import Optimizer as OptimizerRecipe

MASTER = "fp32_param"
"""What a master weight is called beside the moments."""


@dataclass(frozen=True)
class Slot:
    """Elements start:stop of a flattened parameter, and what an optimizer holds of them.

    master: fp32; None where the parameter is fp32 itself. inner, index: torch's optimizer, and the tensor under which
    it keeps its state.
    """

    parameter: Tensor
    start: int
    stop: int
    master: Tensor | None
    inner: Any
    index: Tensor

    def tensors(self, moments: Iterable[str]) -> dict[str, Tensor]:
        """Return the master, if there is one, and the moments of these names: each [stop - start], or of the whole's shape."""
        master = {} if self.master is None else {MASTER: self.master}
        return master | {name: self.inner.state[self.index][name] for name in moments}

    def begin(self, names: Iterable[str], steps: int) -> None:
        """Set moments of these names to zero, and the count of steps as after `steps` steps. None of it when steps is 0."""
        self.inner.state.pop(self.index, None)
        if hasattr(self.inner, "initialize_state"):  # TransformerEngine's, which counts steps by group
            for group in self.inner.param_groups:
                group["step"] = steps
            if steps:
                self.inner.initialize_state(self.index, False)
        elif steps:
            state = self.inner.state[self.index]
            if isinstance(self.inner, torch.optim.Adam):
                group = self.inner.param_groups[0]
                where = self.index.device if group["fused"] or group["capturable"] else "cpu"
                state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=where)
            for name in names:
                state[name] = torch.zeros_like(self.index, dtype=torch.float32)


def moment_names(recipe: OptimizerRecipe) -> tuple[str, ...]:
    """Return what an optimizer keeps for each element beside its master."""
    if recipe.name == "sgd":
        return ("momentum_buffer",) if recipe.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def slots(optimizer: Any, parameters: Iterable[Tensor]) -> Iterator[Slot]:
    """Yield every slot of megatron-core's optimizer (a chain of them). parameters: the model's on this rank."""
    by_index = {id(getattr(p, "main_param", p)): p for p in parameters}
    for one in optimizer.chained_optimizers:
        if isinstance(one, DistributedOptimizer):
            yield from _of_distributed(one)
        elif one.optimizer is not None:
            for group in one.optimizer.param_groups:
                for index in group["params"]:
                    parameter = by_index[id(index)]
                    master = None if index is parameter else index
                    yield Slot(parameter, 0, parameter.numel(), master, one.optimizer, index)


def _of_distributed(one: Any) -> Iterator[Slot]:
    if one.is_stub_optimizer:  # a rank without a parameter of this kind
        return
    hybrid = one.optimizer if isinstance(one.optimizer, HybridDeviceOptimizer) else None
    inner = (
        {id(p): sub for sub in hybrid.sub_optimizers for g in sub.param_groups for p in g["params"]}
        if hybrid
        else {}
    )
    for parameter, (group, place) in one.model_param_group_index_map.items():
        held = one._get_model_param_range_map(parameter)["param"]
        index = one.optimizer.param_groups[group]["params"][place]
        if hybrid:
            index = hybrid.param_to_inner_param[index]
        master = None if parameter.dtype == torch.float32 else index
        yield Slot(parameter, held.start, held.end, master, inner.get(id(index), one.optimizer), index)
