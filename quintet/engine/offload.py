"""Parameters, gradients and optimizer state go to the host between phases, and come back bit by bit the same.

What moves is storage: a tensor's memory is copied to the host and its storage shrunk, so every view of it (flat
buffers and the parameters in them, shards and their masters) stays the same object and is whole again once the
storage has grown back. Gradients carry nothing between steps: their memory is given back without a copy and comes
back zero. What comes back may do so beside what the device computes: whoever requires it waits. Host memory is pinned on GPU
machines, allocated when first needed, and used again each time. On a CPU the same code runs, and merely moves memory to
other memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from quintet.engine.device import CopyAside, free_cached
from quintet.recipe.offload import KINDS, NAMES

CHUNK_BYTES = 1 << 27
"""Host memory comes in pieces of this size: torch rounds each pinned allocation up to a power of two."""
CUT_BYTES = 512
"""Where a storage is cut in two; what the CUDA allocator rounds to."""


@dataclass
class _Away:
    """A storage of which the bytes from `kept` on are not on the device. host: where they are; none of what is lost."""

    storage: torch.UntypedStorage
    nbytes: int
    kept: int
    host: list[Tensor]


class Offloader:
    """Moves one rank's model, and its optimizer's state, between the device and the host.

    chunks: DistributedDataParallel around the model's chunks, or, without training, the chunks themselves.
    optimizer: megatron-core's, set anew whenever another one takes its place.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any = None) -> None:
        self.chunks, self.optimizer = list(chunks), optimizer
        self._away: dict[str, list[_Away]] = {}
        self._coming: dict[str, CopyAside] = {}
        self._host = {kind: _HostMemory() for kind in KINDS}
        for chunk in self.chunks:
            # A rollout may share the modules, and reading a storage of size 0 ends the process.
            module = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
            module.register_forward_pre_hook(lambda *_: self.require("params"))

    def offload(
        self, *, params: float = 0.0, grads: float = 0.0, optimizer: float = 0.0, forget: bool = False
    ) -> int:
        """Free this share of the bytes of each kind on the device (whole tensors, the last one cut); return the bytes that left,
        gradients not counted: no copy of them is made.

        What is away already stays as it is. Gradients are lost; with `forget` all is, and comes back undefined. No
        collective.
        """
        for kind in tuple(self._coming):
            self.came(kind)
        fractions = {"params": params, "grads": grads, "optimizer": optimizer}
        leaving = {
            kind: list(self._leave(kind, fraction, kept=kind != "grads" and not forget))
            for kind, fraction in fractions.items()
            if fraction > 0 and kind not in self._away
        }
        CopyAside(
            (piece, part) for moved in leaving.values() for one in moved for part, piece in _pairs(one)
        ).wait()
        for moved in leaving.values():
            for one in moved:
                one.storage.resize_(one.kept)
        self._away |= {kind: moved for kind, moved in leaving.items() if moved}
        if leaving and torch.cuda.is_available():
            free_cached()  # other processes on this GPU see what was freed
        return sum(one.nbytes - one.kept for kind in leaving if kind != "grads" for one in leaving[kind])

    def reload(self, *kinds: str) -> int:
        """Bring these kinds back, all unless some are named, and return the bytes that came; gradients are zero, and not counted. Harmless
        when nothing is away. No collective."""
        began = self.begin_reload(*kinds)
        for kind in kinds or KINDS:
            self.came(kind)
        return began

    def begin_reload(self, *kinds: str) -> int:
        """Begin what `reload` does, beside what the device computes meanwhile; return the bytes that come."""
        came = 0
        for kind in kinds or KINDS:
            back = self._away.get(kind, [])
            for one in back:
                one.storage.resize_(one.nbytes)
            self._away.pop(kind, None)  # now: memory may have run out before
            if kind == "grads":
                for one in back:
                    _bytes(one.storage, 0, one.nbytes).zero_()
            elif back:
                came += sum(one.nbytes - one.kept for one in back)
                self._coming[kind] = CopyAside(pair for one in back for pair in _pairs(one))
                self._host[kind].used = 0
        return came

    def came(self, kind: str) -> tuple[int, float]:
        """Wait until what comes of a kind is there; its bytes, and the seconds that they took. Nothing of what is waited for already."""
        coming = self._coming.pop(kind, None)
        return (0, 0.0) if coming is None else (coming.nbytes, coming.wait())

    def require(self, *kinds: str) -> None:
        """Raise RuntimeError when one of the kinds is not all on the device, or on its way: what uses it from now on waits for that."""
        away = [NAMES[kind] for kind in kinds if kind in self._away]
        if away:
            raise RuntimeError(f"{' and '.join(away)} are offloaded: call reload() before they are used")
        for kind in kinds:
            if kind in self._coming:
                self._coming[kind].before_what_follows()

    def _leave(self, kind: str, fraction: float, *, kept: bool) -> Iterator[_Away]:
        """Choose storages in their fixed order until `fraction` of the kind's bytes is reached, and host memory for what is
        kept."""
        storages = list(self._storages(kind))
        left = int(fraction * sum(s.nbytes() for s in storages))
        for storage in storages:
            if left <= 0:
                return
            size = storage.nbytes()
            staying = max(size - left, 0) // CUT_BYTES * CUT_BYTES
            left -= size - staying
            host = self._host[kind].take(size - staying) if kept else []
            yield _Away(storage, size, staying, host)

    def _storages(self, kind: str) -> Iterator[torch.UntypedStorage]:
        """The storages of a kind on the device, each once."""
        if kind == "params":
            return _unique(self._params())
        if kind == "grads":
            return _unique(self._grads())
        others = {s._cdata for s in _unique([*self._params(), *self._grads()])}
        return (s for s in _unique(self._states()) if s._cdata not in others)

    def _params(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    def _grads(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                yield from (flat.grad_data for flat in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def _states(self) -> Iterator[Tensor]:
        """Master weights and moments; without step counters, and without what is on the CPU for good."""
        device = next(self._params()).device
        for one in getattr(self.optimizer, "chained_optimizers", ()):
            for inner in (one.optimizer, *getattr(one.optimizer, "sub_optimizers", ())):
                for group in inner.param_groups if inner is not None else ():
                    for parameter in group["params"]:
                        for tensor in (parameter, *inner.state.get(parameter, {}).values()):
                            if torch.is_tensor(tensor) and tensor.dim() and tensor.device == device:
                                yield tensor


class _HostMemory:
    """Host memory that is given out piece by piece, and all of it again after `used` is set back to 0."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []
        self.used = 0

    def take(self, nbytes: int) -> list[Tensor]:
        """Views [bytes] that together hold nbytes."""
        pieces = []
        while nbytes:
            number, start = divmod(self.used, CHUNK_BYTES)
            if number == len(self.chunks):
                pinned = torch.cuda.is_available()
                self.chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned))
            piece = self.chunks[number][start : start + nbytes]
            pieces.append(piece)
            self.used += len(piece)
            nbytes -= len(piece)
        return pieces


def _unique(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _bytes(storage: torch.UntypedStorage, start: int, stop: int) -> Tensor:
    """[stop - start] bytes of a storage, as a view."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (stop - start,), (1,))


def _pairs(one: _Away) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts on the device, and their pieces on the host."""
    start = one.kept
    for piece in one.host:
        yield _bytes(one.storage, start, start + len(piece)), piece
        start += len(piece)
