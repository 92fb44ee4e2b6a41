"""Whether two checkpoints hold the same state, in whatever layouts they were written."""

from __future__ import annotations

from pathlib import Path

import torch

from quintet.engine.checkpoint.reader import Reader
from quintet.models.mcore import whole_box

SAME = ("steps", "optimizer", "moments", "dtype", "adapters")
"""What state.json says that no layout changes."""


def differences(one: Path, other: Path) -> list[str]:
    """Return what differs, in words: weights, masters and moments bit by bit, and the steps. Empty when nothing does.

    Needs memory for a tensor of each. Raises UserError for what is damaged.
    """
    a, b = Reader(one), Reader(other)
    said = a.state(), b.state()
    found = [
        f"{name} is {said[0].get(name)} and {said[1].get(name)}"
        for name in SAME
        if said[0].get(name) != said[1].get(name)
    ]
    found += [f"{key} is missing" for key in sorted(a.tensors.keys() - b.tensors.keys())]
    found += [f"{key} is new" for key in sorted(b.tensors.keys() - a.tensors.keys())]
    for key in sorted(a.tensors.keys() & b.tensors.keys()):
        mine, theirs = a.tensors[key], b.tensors[key]
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            found.append(f"{key} is {mine.dtype} {mine.shape} and {theirs.dtype} {theirs.shape}")
            continue
        whole = whole_box(mine.shape)
        x, y = (reader.read_box(key, whole).flatten().view(torch.uint8) for reader in (a, b))
        if not torch.equal(x, y):
            found.append(f"{key} is not the same")
    return found
