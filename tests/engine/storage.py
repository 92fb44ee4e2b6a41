"""What an engine has allocated, found without the code under test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tensors(engine: Any) -> dict[str, list[Tensor]]:
    """Tensors on the engine's device, by kind: params, grads, and optimizer (masters and moments)."""
    found: dict[str, list[Tensor]] = {"params": [], "grads": [], "optimizer": []}
    for chunk in engine._wrapped:
        found["params"] += [p.data for p in chunk.parameters()]
        found["grads"] += [p.main_grad for p in chunk.parameters() if hasattr(p, "main_grad")]
    known = {t.untyped_storage()._cdata for kind in ("params", "grads") for t in found[kind]}
    for one in engine._optimizer.chained_optimizers if engine._optimizer else ():
        state = one.optimizer.state
        for group in one.optimizer.param_groups:
            for p in group["params"]:
                mine = [p, *(t for t in state.get(p, {}).values() if torch.is_tensor(t) and t.dim())]
                mine = [t for t in mine if t.device == p.device]  # the hybrid optimizer's are on the CPU
                found["optimizer"] += [t for t in mine if t.untyped_storage()._cdata not in known]
    return found


def held(engine: Any) -> dict[str, int]:
    """Bytes of storage by kind."""
    storages = {
        kind: {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
        for kind, found in tensors(engine).items()
    }
    return {kind: sum(sizes.values()) for kind, sizes in storages.items()}
