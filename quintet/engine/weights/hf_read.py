"""Weights from safetensors files into this rank's shards: only the bytes they need, by several threads, in the order of
the files.

What lies in one piece in the file and in the parameter is read right into the parameter. Everything else (another type,
a GPU, interleaved rows, columns, 8 bits with their blocks' scales) goes through a buffer a thread. All buffers together are never more than the model's
largest tensor: that and the shards themselves are the host memory of a load. Files are read with pread: pages of
a memory-mapped file would count as the process's memory, and each would cost a fault.
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.engine.device import memory
from quintet.engine.weights import fp8
from quintet.engine.weights.shards import Box, Shard
from quintet.errors import UserError
from quintet.models import fp8_blocks
from quintet.models.checksums import BLOCK_BYTES, damaged, recorded_sums
from quintet.models.mcore import box_sizes
from quintet.models.safetensors_header import DTYPES, Entry
from quintet.models.weights_on_disk import VALUE_HEAD, Located, WeightsOnDisk

CHUNK_BYTES = 8 << 20
"""Read at once. Large enough for disks and PCIe, small enough that what was read is still in a CPU cache."""
THREADS = 8

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    fp8_blocks.DTYPE: torch.bfloat16,
}
"""Types in which weights are held that a file holds as another tool calls it; 8 bits are multiplied by their blocks' scales."""


@dataclass(frozen=True)
class Piece:
    """A part of a shard that is read at once.

    dim: the first dim of the box that has more than one index; before it one index each. start, stop: the bytes of
    the tensor that hold indices box[dim] with everything behind them, also what the box leaves out of later dims.
    """

    shard: Shard
    file: Path
    entry: Entry
    box: Box
    dim: int
    start: int
    stop: int
    scales: Located | None = None

    @property
    def cuts_columns(self) -> bool:
        """Whether the piece's bytes hold more than the box."""
        return math.prod(b - a for a, b in self.box) * DTYPES[self.entry.dtype] != self.stop - self.start


def _pieces(shard: Shard, located: Located) -> Iterator[Piece]:
    """A shard's box in pieces of about CHUNK_BYTES as they are computed with, cut where its view can be cut."""
    width = DTYPES[located.entry.dtype]
    # Of values and, where there are some, of their scales in fp32.
    most = CHUNK_BYTES if located.scales is None else CHUNK_BYTES // 8
    strides = [math.prod(shard.shape[dim + 1 :]) * width for dim in range(len(shard.shape))]

    def cut(box: Box, dim: int, offset: int) -> Iterator[Piece]:
        (first, last), stride = box[dim], strides[dim]
        unit = shard.unit(dim)
        inner = dim + 1 < len(box) and stride > most
        step = 1 if inner else max(most // (unit * stride), 1) * unit
        for start in range(first, last, step):
            stop = min(start + step, last)
            part = (*box[:dim], (start, stop), *box[dim + 1 :])
            if inner:
                yield from cut(part, dim + 1, offset + start * stride)
            else:
                yield Piece(
                    shard,
                    located.file,
                    located.entry,
                    part,
                    dim,
                    offset + start * stride,
                    offset + stop * stride,
                    located.scales,
                )

    yield from cut(shard.box, 0, 0)


def same_bytes(one: Located, other: Located) -> bool:
    """Return whether two tensors are the same, bit by bit.

    Raises UserError naming the file when one cannot be read.
    """
    if one.entry.dtype != other.entry.dtype:
        return False
    size = one.entry.stop - one.entry.start
    for at in range(0, size, CHUNK_BYTES):
        here, there = (of.read(at, min(at + CHUNK_BYTES, size)) for of in (one, other))
        if here != there:
            return False
    return one.scales is None or other.scales is None or same_bytes(one.scales, other.scales)


class HfReader(AbstractContextManager["HfReader"]):
    """The tensors of a Hugging Face directory. A context: files stay open and buffers allocated until it is left."""

    def __init__(self, weights: WeightsOnDisk) -> None:
        self._weights = weights
        largest = max((one.entry.stop - one.entry.start for one in weights.tensors.values()), default=0)
        self._threads = max(1, min(THREADS, largest // (CHUNK_BYTES + 2 * BLOCK_BYTES)))
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(self._threads))
        self._lock = threading.Lock()
        self._open: dict[Path, tuple[int, dict[str, list[int]] | None]] = {}
        self._mine = threading.local()
        self._failed = False
        self._finite: list[tuple[Piece, Tensor]] = []

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def fill(self, shards: Iterable[Shard]) -> None:
        """Copy tensors from files into shards, converted to the shards' types. A value head that no file has starts at zero. No
        collective.

        Raises UserError naming file and tensor for what cannot be read, does not fit its checksum, or holds values that
        are not finite; the shards' contents are then no model.
        """
        tensors, pieces = self._weights.tensors, list[Piece]()
        for shard in shards:
            if shard.name == VALUE_HEAD and VALUE_HEAD not in tensors:
                shard.view.zero_()
            else:
                pieces += _pieces(shard, tensors[shard.name])
        pieces.sort(key=lambda piece: (piece.file, piece.entry.start + piece.start))
        for failure in list(self._pool.map(self._read_unless_failed, pieces)):
            if failure is not None:
                raise failure
        self._check_finite()

    def _read_unless_failed(self, piece: Piece) -> UserError | None:
        """Read one piece; after a failure, nothing more. Called by several threads."""
        if self._failed:
            return None
        device = piece.shard.view.device
        try:
            with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                self._read(piece)
        except OSError as error:
            self._failed = True
            return UserError(f"{piece.file}: {piece.shard.name} cannot be read: {error.strerror}")
        except UserError as error:
            self._failed = True
            return error
        return None

    def _file(self, file: Path) -> tuple[int, dict[str, list[int]] | None]:
        """Descriptor and checksums of a file."""
        with self._lock:
            if file not in self._open:
                sums = recorded_sums(self._weights.headers[file], file)
                self._open[file] = self._stack.enter_context(file.open("rb", buffering=0)).fileno(), sums
            return self._open[file]

    def _read(self, piece: Piece) -> None:
        view, dtype = piece.shard.part(piece.box), TORCH_DTYPES[piece.entry.dtype]
        straight = view.device.type == "cpu" and view.dtype == dtype and view.is_contiguous()
        if straight and not piece.cuts_columns and piece.scales is None:
            self._read_bytes(piece, memory(view))
        else:
            self._through_buffer(piece, view, dtype)
        self._look(piece, view)

    def _through_buffer(self, piece: Piece, view: Tensor, dtype: torch.dtype) -> None:
        mine, on_gpu, size = self._mine, view.device.type == "cuda", piece.stop - piece.start
        # Scales go through the same buffer.
        scales = None if piece.scales is None else self._scales(piece, piece.scales)
        if getattr(mine, "copied", None) is not None:
            mine.copied.synchronize()  # the GPU may still be reading what the buffer held before
        if not hasattr(mine, "buffer") or len(mine.buffer) < size:
            mine.buffer = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8, pin_memory=on_gpu)
        held = mine.buffer[:size]
        self._read_bytes(piece, memory(held))
        rows = held.view(dtype if scales is None else fp8.DTYPE).view(-1, *piece.shard.shape[piece.dim + 1 :])
        if on_gpu:
            rows = rows.to(view.device, non_blocking=True)
            mine.copied = torch.cuda.Event()
            mine.copied.record()
        later = piece.box[piece.dim + 1 :]
        part = rows[(slice(None), *(slice(start, stop) for start, stop in later))]
        if scales is not None:
            (first, _), (left, _) = piece.box
            at = (first % fp8.BLOCK, left)
            part = fp8.dequantize(part.reshape(box_sizes(piece.box)), scales.to(view.device), at)
        view.copy_(part.reshape(view.shape))

    def _scales(self, piece: Piece, located: Located) -> Tensor:
        """Scales of the rows of blocks that a piece lies in, fp32 on the CPU."""
        (start, stop), shape = piece.box[0], located.entry.shape
        box = ((start // fp8.BLOCK, -(-stop // fp8.BLOCK)), (0, shape[1]))
        scales = torch.empty(box_sizes(box))
        of = Shard(piece.shard.name + fp8.SCALE, shape, box, scales)
        for one in _pieces(of, located):
            self._read(one)
        return scales

    def _read_bytes(self, piece: Piece, into: memoryview) -> None:
        """Read a piece's bytes, and check every block of them that has a checksum: with what is left and right of the
        piece in the same blocks."""
        sums = self._file(piece.file)[1]
        size = piece.entry.stop - piece.entry.start
        start, stop = piece.start, piece.stop
        if sums is not None:
            start = start // BLOCK_BYTES * BLOCK_BYTES
            stop = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, size)
        parts = [memoryview(bytearray(piece.start - start)), into, memoryview(bytearray(stop - piece.stop))]
        self._read_parts(piece, parts, start)
        if sums is not None:
            wanted = sums[piece.shard.name][start // BLOCK_BYTES : -(-stop // BLOCK_BYTES)]
            if list(_block_sums(parts)) != wanted:
                raise damaged(piece.file, piece.shard.name)

    def _read_parts(self, piece: Piece, parts: list[memoryview], start: int) -> None:
        left = [part for part in parts if len(part)]
        at = piece.entry.start + start
        descriptor, _ = self._file(piece.file)
        while left:
            count = os.preadv(descriptor, left, at)
            if not count:
                raise UserError(f"{piece.file}: {piece.shard.name} cannot be read: the file ends before it")
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]

    def _look(self, piece: Piece, view: Tensor) -> None:
        """See that all values are finite: at once on a CPU, at the end on a GPU, which is not waited for here."""
        if view.device.type == "cuda":
            self._finite.append((piece, torch.isfinite(view).all()))
        # A sum is 20 times as fast, and finite only if all values are; a large one may overflow.
        elif not (torch.isfinite(view.sum()) or torch.isfinite(view).all()):
            raise _not_finite(piece)

    def _check_finite(self) -> None:
        """Wait for the GPU. Raises UserError for the first tensor with a value that is not finite."""
        found, self._finite = self._finite, []
        if found:
            flags: list[bool] = torch.stack([flag for _, flag in found]).tolist()
            for (piece, _), good in zip(found, flags, strict=True):
                if not good:
                    raise _not_finite(piece)


def _not_finite(piece: Piece) -> UserError:
    return UserError(
        f"{piece.file}: {piece.shard.name} holds values that are not finite as {piece.shard.view.dtype}: the file is "
        "damaged, or the model that was saved had diverged; get the file again"
    )


def _block_sums(parts: list[memoryview]) -> Iterator[int]:
    """CRC-32 of each block of bytes that lie in several places; the first starts on a block."""
    crc, filled = 0, 0
    for part in parts:
        at = 0
        while at < len(part):
            taken = min(len(part) - at, BLOCK_BYTES - filled)
            crc = zlib.crc32(part[at : at + taken], crc)
            at, filled = at + taken, filled + taken
            if filled == BLOCK_BYTES:
                yield crc
                crc, filled = 0, 0
    if filled:
        yield crc
