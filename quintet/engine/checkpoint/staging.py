"""Host memory between the device and the disk, kept from one save to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quintet.engine.device import CopyAside

BUFFER_BYTES = 128 << 20
"""Memory comes in buffers of this size, or of one tensor's if that is larger: torch rounds each pinned allocation up to
a power of two."""
_ALIGN = 64


class Staging:
    """Copies of tensors on the host, pinned on GPU machines."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a copy of each on the CPU, which owns its storage; valid until the next call. Waits for what computes them.

        On a GPU machine tensors may be on either side; those on the GPU are copied on a stream of their own.
        """
        copies = self._room(tensors)
        CopyAside(zip(copies, tensors, strict=True)).wait()
        return copies

    def _room(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Empty tensors of the same types and sizes: buffers are filled in order, each as far as the next one fits."""
        found, number, used = [], 0, 0
        for tensor in tensors:
            size = tensor.nbytes
            while number < len(self._buffers) and used + size > len(self._buffers[number]):
                number, used = number + 1, 0
            if number == len(self._buffers):
                pinned = torch.cuda.is_available()
                self._buffers.append(
                    torch.empty(max(BUFFER_BYTES, size), dtype=torch.uint8, pin_memory=pinned)
                )
                used = 0
            found.append(_owning(self._buffers[number], used, tensor))
            used += -(-size // _ALIGN) * _ALIGN
        return found


def _owning(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """A tensor over part of a buffer whose storage is that part alone: torch.save writes whole storages."""
    if not like.nbytes:
        return torch.empty_like(like, device="cpu")
    part: Any = buffer.numpy()[start : start + like.nbytes]
    return torch.frombuffer(part, dtype=torch.uint8).view(like.dtype).view(like.shape)
