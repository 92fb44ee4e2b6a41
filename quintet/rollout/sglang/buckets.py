"""Whole Hugging Face tensors, as they come, in buckets that SGLang's workers load together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quintet.errors import QuintetError
from quintet.models.mcore import whole_box
from quintet.rollout.base import Piece

ALIGNMENT = 256
"""Bytes; every tensor begins at a multiple."""

_PARTNERS = {"q_a_proj": "kv_a_proj_with_mqa", "kv_a_proj_with_mqa": "q_a_proj"}
"""Two tensors of latent attention that SGLang's models join while they load, and only within one bucket
(sglang 0.5.17, srt/models/glm4_moe_lite.py: `cached_a_proj`)."""

Entry = tuple[str, tuple[int, ...], torch.dtype, int, int]
"""Name, shape, dtype, and the bytes of the bucket from start to stop."""


@dataclass
class Bucket:
    """Bytes on a device and what lies where in them. Each has memory of its own: SGLang may be reading from the one before."""

    flat: Tensor
    entries: list[Entry] = field(default_factory=list)
    end: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        start = _aligned(self.end)
        self.end = stop = start + tensor.nbytes
        self.flat[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self.entries.append((name, tuple(tensor.shape), tensor.dtype, start, stop))


def in_buckets(pieces: Iterable[Piece], bucket_mib: int, device: torch.device) -> Iterator[Bucket]:
    """Copy the pieces into buckets of `bucket_mib` on the device; what is larger has a bucket of its own.

    Raises QuintetError for a piece that is not a whole tensor.
    """
    size, bucket = bucket_mib << 20, None
    for tensors in _together(pieces):
        needed = sum(_aligned(tensor.nbytes) for _, tensor in tensors)
        if bucket is not None and _aligned(bucket.end) + needed > len(bucket.flat):
            yield bucket
            bucket = None
        if bucket is None:
            bucket = Bucket(torch.empty(max(size, needed), dtype=torch.uint8, device=device))
        for name, tensor in tensors:
            bucket.add(name, tensor)
    if bucket is not None:
        yield bucket


def _together(pieces: Iterable[Piece]) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors, those that must share a bucket beside one another; one without its partner comes at the end."""
    waiting: dict[str, Tensor] = {}
    for piece in pieces:
        if piece.box != whole_box(piece.shape):
            raise QuintetError(
                f"{piece.name}: SGLang takes whole tensors, and got the part {piece.box} of it"
            )
        partner = re.sub(
            "|".join(rf"(?<=\.){name}(?=\.)" for name in _PARTNERS), lambda m: _PARTNERS[m[0]], piece.name
        )
        if partner == piece.name:
            yield [(piece.name, piece.tensor)]
        elif partner in waiting:
            yield [(partner, waiting.pop(partner)), (piece.name, piece.tensor)]
        else:
            waiting[piece.name] = piece.tensor.clone()  # its memory is the next piece's
    yield from ([one] for one in waiting.items())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
