"""Gradient norms of sets of parameters, each clipped by its own: what one set does cannot shrink another's update.

Core's optimizers have one norm for all. With its distributed optimizer, gradients are slices over dp and cp by the time a norm is
taken, so each norm is a sum over all ranks, those without a parameter of the set too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

SET = "gradient_set"
"""What a parameter group says of its set; "" where it says nothing."""


def clipped_step(optimizer: Any, most: Mapping[str, float | None]) -> dict[str, float]:
    """Take a step of megatron-core's optimizer, and return the gradient norm of each set before it was clipped. Collective.

    most: the norm that each set's gradients are scaled down to; None leaves them. The same sets on every rank.
    """
    optimizer.prepare_grads()
    norms = {name: _norm(optimizer.chained_optimizers, name) for name in most}
    for one in optimizer.chained_optimizers:
        decoupled = one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        for name, limit in most.items():
            if limit is not None and (parameters := _parameters(one, name)):
                clip_grad_by_total_norm_fp32(parameters, limit, norms[name], decoupled)
    optimizer.step_with_ready_grads()
    return norms


def _parameters(optimizer: Any, name: str) -> list[Any]:
    """Those of a set, of one of the chained optimizers: of a stub, which a rank without parameters has, none."""
    groups = [] if optimizer.is_stub_optimizer else optimizer.optimizer.param_groups
    return [p for group in groups if group.get(SET, "") == name for p in group["params"]]


def _norm(optimizers: Iterable[Any], name: str) -> float:
    """Over all ranks. Optimizers whose gradients are summed over the same ranks are one list."""
    by_group: dict[Any, list[Tensor]] = {}
    for one in optimizers:
        by_group.setdefault(one.get_grad_stats_parallel_group(), []).extend(_counted(one, name))
    norms = [get_grad_norm_fp32(grads, grad_stats_parallel_group=group) for group, grads in by_group.items()]
    return float(norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms)))


def _counted(optimizer: Any, name: str) -> list[Tensor]:
    """The gradients that count in the norm on this rank: of what several ranks hold, one's (as core's
    `get_main_grads_for_grad_norm` has it, which knows no sets)."""
    decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    tp = getattr(optimizer, "tp_group", None)
    found = []
    for parameter in _parameters(optimizer, name):
        grad = getattr(parameter, "decoupled_grad", None) if decoupled else parameter.grad
        once = param_is_not_shared(parameter) and tensor_parallel.param_is_not_tensor_parallel_duplicate(
            parameter, tp
        )
        if grad is not None and once:
            found.append(grad)
    return found
