"""What both directions share: parameters held in full, and what a conversion came to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.engine.weights.shards import Shard, whole
from quintet.errors import UserError
from quintet.models import ModelShape, Weight
from quintet.models.mcore import Block, CheckpointMap, box_sizes

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all, a parameter at a time."""


@dataclass(frozen=True)
class Converted:
    """What was written: bytes of weights, tensors, and seconds. notes: what the user should know of it."""

    nbytes: int
    tensors: int
    seconds: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        unit, name = (1e9, "GB") if self.nbytes >= 1e9 else (1e6, "MB")
        size, rate = self.nbytes / unit, self.nbytes / unit / max(self.seconds, 1e-9)
        return f"{self.tensors} tensors, {size:.1f} {name} in {self.seconds:.1f} s, {rate:.1f} {name}/s"


def wanted_dtype(dtype: str | None) -> torch.dtype | None:
    """Return the type that a name of DTYPES means, None for None. Raises UserError for a name that is none of DTYPES."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype {dtype}: expected one of {', '.join(DTYPES)}")
    return None if dtype is None else DTYPES[dtype]


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the type that holds all values of tensors that become one parameter."""
    found, *others = dtypes
    for one in others:
        found = torch.promote_types(found, one)
    return found


class Parameter:
    """One parameter of the table in full, as a model without tensor parallelism holds it.

    blocks: views of it by the checkpoint's keys. shards: views of it by Hugging Face names.
    """

    def __init__(self, table: CheckpointMap, weight: Weight, shape: ModelShape, dtype: torch.dtype) -> None:
        parts = table.blocks(weight.name)
        rows = sum(stop - start for (start, stop), *_ in (one.box for one in parts))
        data = torch.empty((rows, *parts[0].shape[1:]), dtype=dtype)
        flat = data.view(-1)
        self.nbytes = flat.numel() * dtype.itemsize
        self.blocks: dict[str, tuple[Block, Tensor]] = {
            one.key: (one, flat[one.start : one.stop].view(box_sizes(one.box))) for one in parts
        }
        self.shards: list[Shard] = whole(weight, data, shape)
