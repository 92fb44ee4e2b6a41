"""The files of a checkpoint, as PyTorch's distributed checkpointing and megatron-core's `torch_dist` back end read them.

    __3_0.distcp     tensors of rank 3, one after another, each as torch.save writes it; __3_1.distcp, … where they are many
    .metadata        which boxes of which tensors lie where (a pickle of PyTorch's own classes)
    metadata.json    megatron-core's name of the format
    common.pt        what Megatron-LM wants to know beside tensors; quintet does not read it
    state.json       what quintet wants to know beside tensors
    rng-00003.json   random states of rank 3
    checksums.json   sizes of all files, and a CRC32 of each tensor and of each other file

`checksums.json` is the last to be written.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.errors import UserError
from quintet.models.mcore import Box, box_sizes
from quintet.runs.checkpoints import CHECKSUMS as CHECKSUMS
from quintet.runs.fsync import fsync_path
from quintet.skip_dynamo_import import uncompiled
from quintet.typed import Dtype

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

INDEX = ".metadata"
STATE = "state.json"
SINGLE = {"singleton_local_shards": True, "non_homogeneous_layers": True}
"""How the tensors are named, in megatron-core's words: one a layer and expert."""


@dataclass(frozen=True)
class Entry:
    """One written tensor: a box of the tensor `key` of `shape`, and where it is. crc: CRC32 of the bytes there."""

    key: str
    shape: tuple[int, ...]
    box: Box
    dtype: Dtype
    file: str
    offset: int
    length: int
    crc: int


class TensorFile(contextlib.AbstractContextManager["TensorFile"]):
    """A file of tensors, written one after another.

    As a context it is closed at the end, or removed after an error. OSError (a full disk, no permission) names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self._file = path.open("xb")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(OSError):  # what is still buffered may not fit on the disk either
            self._file.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> list[Entry]:
        """Wait until all is on the disk; returns what was written."""
        with _naming(self.path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return self.entries

    def add(self, key: str, shape: tuple[int, ...], box: Box, tensor: Tensor) -> None:
        """Append the contents of a box: a tensor on the CPU that owns the whole of its storage."""
        stream: Any = _Checked(self._file)
        offset = self._file.tell()
        with _naming(self.path):
            try:
                torch.save(tensor.view(box_sizes(box)), stream)
            except RuntimeError:  # torch's words for a stream that did not take all
                raise stream.error or OSError("it took less than was written") from None
        length = self._file.tell() - offset
        self.entries.append(
            Entry(key, tuple(shape), box, tensor.dtype, self.path.name, offset, length, stream.crc)
        )


class _Checked:
    """A stream that keeps the CRC32 of what is written to it, and the error of the disk under it."""

    def __init__(self, file: Any) -> None:
        self._file, self.crc = file, 0
        self.error: OSError | None = None
        self.flush = file.flush

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of writing do not say what was written; opening's do."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write one JSON file, which is on the disk when this returns."""
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write one file, which is on the disk when this returns."""
    with _naming(path), path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(path: Path, entries: Iterable[Entry], state: dict[str, Any]) -> None:
    """Write what makes a directory of tensor files a checkpoint. state: content of state.json; `steps` is among it.

    Raises UserError when a file of another rank is not there, OSError naming the file that cannot be written.
    """
    found = list(entries)
    unseen = sorted({e.file for e in found if not (path / e.file).is_file()})
    if unseen:
        raise UserError(
            f"{path}: rank 0 does not see {unseen[0]}, which another rank wrote: save to a directory that all machines share"
        )
    write_bytes(path / INDEX, pickle.dumps(_index(found)))
    write_json(path / "metadata.json", _BACKENDS)
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0, "iteration": state["steps"], "content_metadata": SINGLE}, common)
    write_bytes(path / "common.pt", common.getvalue())
    write_json(path / STATE, state)
    tensors: dict[str, dict[str, int]] = defaultdict(dict)
    for entry in found:
        tensors[entry.file][str(entry.offset)] = entry.crc
    files = {}
    for file in sorted(path.iterdir()):
        crc = None if file.name in tensors else zlib.crc32(file.read_bytes())
        files[file.name] = {"bytes": file.stat().st_size} | ({} if crc is None else {"crc32": crc})
    write_json(path / CHECKSUMS, {"files": files, "tensors": tensors})
    fsync_path(path)


_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _index(entries: list[Entry]) -> Metadata:
    with uncompiled():  # only now: they bring torch's distributed tensors and FSDP
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

    tensors: dict[str, Any] = {}
    places = {}
    for entry in entries:
        offsets = torch.Size(start for start, _ in entry.box)
        sizes = torch.Size(box_sizes(entry.box))
        known = tensors.setdefault(
            entry.key,
            TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), []),
        )
        places[MetadataIndex(entry.key, offsets, len(known.chunks))] = _StorageInfo(
            entry.file, entry.offset, entry.length
        )
        known.chunks.append(ChunkStorageMetadata(offsets, sizes))
    return Metadata(tensors, planner_data={}, storage_data=places)
