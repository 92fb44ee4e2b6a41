"""Writes a Hugging Face directory tensor by tensor: safetensors files, their index and their checksums.

Names, shapes and types are known beforehand, so every file's header and every tensor's place in it are, too: tensors
are written when they come, in any order, by a few threads that also make their checksums. All happens in a directory
of a temporary name, which takes its own name once everything is on the disk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.models.checksums import BLOCK_BYTES, KEY, as_metadata, block_count, block_sums
from quintet.runs.atomic_dir import atomic_directory

SHARD_BYTES = 4 << 30
PART_BYTES = 64 * BLOCK_BYTES
"""What one thread checks and writes at a time."""
THREADS = 4

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Planned:
    """One tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def in_order(planned: Iterable[Planned], most_bytes: int) -> Iterator[list[Planned]]:
    """Yield the tensors in groups of at most so many bytes, or of a single one that is larger."""
    group: list[Planned] = []
    held = 0
    for one in planned:
        if group and held + one.nbytes > most_bytes:
            yield group
            group, held = [], 0
        group.append(one)
        held += one.nbytes
    yield group


@dataclass
class _File:
    """A safetensors file that is being written. starts: where each tensor's bytes begin."""

    path: Path
    tensors: list[Planned]
    descriptor: int
    starts: dict[str, int]
    sums: dict[str, list[str]]


@contextmanager
def hf_writer(path: Path, planned: Sequence[Planned], shard_bytes: int | None = None) -> Iterator[HfWriter]:
    """Write planned tensors to `path`, which must not be there yet, or be an empty directory.

        with hf_writer(path, planned) as writer:
            writer.add(name, tensor)                    # each of them, in any order
            writer.directory                            # where config.json and the tokenizer go

    Leaving the block publishes the directory; leaving it by an error removes what was written. Raises UserError naming the path
    and the reason when the disk does not take what is written.
    """
    with (
        atomic_directory(path, sum(one.nbytes for one in planned)) as directory,
        ExitStack() as files,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        files_of = in_order(planned, SHARD_BYTES if shard_bytes is None else shard_bytes)
        writer = HfWriter(directory, list(files_of), pool, files)
        try:
            yield writer
            writer.finish()
        finally:
            pool.shutdown(cancel_futures=True)


class HfWriter:
    """Writes tensors to a directory (see `hf_writer`), those of each group to a file of their own."""

    def __init__(
        self, directory: Path, groups: list[list[Planned]], pool: ThreadPoolExecutor, files: ExitStack
    ) -> None:
        self.directory, self._pool = directory, pool
        self.total_bytes = sum(one.nbytes for group in groups for one in group)
        self._files: list[_File] = []
        self._file_of: dict[str, tuple[_File, Planned]] = {}
        self._tasks: list[Future[None]] = []
        for number, tensors in enumerate(groups, start=1):
            single = len(groups) == 1
            name = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            self._start(directory / name, tensors, files)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the planned shape and type, from the CPU. It must not change before the block is left."""
        file, planned = self._file_of.pop(name)
        if (tuple(tensor.shape), tensor.dtype) != (planned.shape, planned.dtype):
            raise ValueError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, planned was {planned}")
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        parts = range(0, len(data), PART_BYTES)
        file.sums[name] = [""] * len(parts)
        self._wait(most=2 * THREADS)
        for number, start in enumerate(parts):
            part = data[start : start + PART_BYTES]
            self._tasks.append(self._pool.submit(self._write, file, name, number, start, part))

    def _write(self, file: _File, name: str, number: int, start: int, part: memoryview) -> None:
        file.sums[name][number] = block_sums(part)
        _put(file.descriptor, part, file.starts[name] + start)

    def _wait(self, most: int = 0) -> None:
        """Until at most so many tasks are under way."""
        while len(self._tasks) > most:
            self._tasks.pop(0).result()

    def _start(self, path: Path, tensors: list[Planned], files: ExitStack) -> None:
        descriptor = files.enter_context(path.open("xb", buffering=0)).fileno()
        file = _File(path, tensors, descriptor, {}, {})
        self._files.append(file)
        at = len(_header(tensors, {one.name: "0" * 8 * block_count(one.nbytes) for one in tensors}))
        for one in tensors:
            file.starts[one.name] = at
            self._file_of[one.name] = (file, one)
            at += one.nbytes

    def finish(self) -> None:
        """Wait for all tensors, and write the headers, which tell the checksums, and the index."""
        if self._file_of:
            raise ValueError(f"planned and not written: {', '.join(sorted(self._file_of))}")
        self._wait()
        for file in self._files:
            _put(file.descriptor, _header(file.tensors, {n: "".join(s) for n, s in file.sums.items()}), 0)
        if len(self._files) > 1:
            weight_map = {one.name: file.path.name for file in self._files for one in file.tensors}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2) + "\n"
            (self.directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _put(descriptor: int, data: bytes | memoryview, at: int) -> None:
    while data:  # of what a disk that is filling up has room for, the system may write a part
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count


def _header(tensors: list[Planned], sums: dict[str, str]) -> bytes:
    """Length and JSON of a file's header, to a multiple of 8 bytes. Its size does not depend on the checksums' values."""
    ordered = {one.name: sums[one.name] for one in tensors}
    content: dict[str, Any] = {"__metadata__": {"format": "pt", KEY: as_metadata(ordered)}}
    at = 0
    for one in tensors:
        offsets = [at, at + one.nbytes]
        content[one.name] = {
            "dtype": DTYPE_NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": offsets,
        }
        at = offsets[1]
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
