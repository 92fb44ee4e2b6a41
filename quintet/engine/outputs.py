"""What a loss is handed, the model's outputs and the batch's fields at the trained tokens, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.algorithms.aggregation import Tally
from quintet.data.batch import Batch
from quintet.engine.device import upload

if TYPE_CHECKING:  # without megatron-core, whose import the engine prepares
    from quintet.engine.row import TargetSet


@dataclass
class Outputs:
    """What the model says about the N trained tokens of a micro-batch, both fp32 [N]. The same on every tp and cp rank:
    a loss sees whole samples in every layout."""

    logprobs: Tensor
    entropy: Tensor


@dataclass
class ValueOutputs:
    """What a value model says: fp32 [N], of each trained token the value of the state it was chosen in."""

    values: Tensor


Loss = Callable[[Any, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
"""(outputs, fields of the same N tokens) → (this micro-batch's share of the loss, quantities [N] to be averaged)."""


@dataclass
class MiniBatchResult:
    """What one rank counts of a mini-batch: its cells' share of the loss, and their tally of quantities."""

    loss: float
    tally: Tally


def flat_fields(batch: Batch, device: torch.device) -> dict[str, tuple[bool, Tensor]]:
    """Return a batch's fields that a loss may read, flat, on the device: (is per token, values)."""
    out = {}
    for name, value in batch.items():
        if name in ("input_ids", "routes"):
            continue
        out[name] = (value.is_nested, upload(value.values() if value.is_nested else value, device))
    return out


def fields_of(fields: dict[str, tuple[bool, Tensor]], targets: TargetSet) -> dict[str, Tensor]:
    """Return the fields at a micro-batch's N targets; per-sample ones are repeated for each token.

    `sample` tells the tokens' samples apart: positions in the rank's batch.
    """
    token, sample = targets.token_index, targets.sample
    device = next(iter(fields.values()))[1].device
    token, sample = upload(token, device), upload(sample, device)
    out = {name: v.index_select(0, token if jagged else sample) for name, (jagged, v) in fields.items()}
    out["sample"] = sample
    return out
