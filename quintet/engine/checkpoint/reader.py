"""Reading a checkpoint in torch_dist format, quintet's or Megatron-LM's, from a place that is not trusted."""

from __future__ import annotations

import io
import json
import pickle
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.engine.checkpoint.format import CHECKSUMS, INDEX, STATE
from quintet.engine.checkpoint.unpickle import unpickle
from quintet.errors import DamagedCheckpoint, UserError, reading
from quintet.models.mcore import Box, box_sizes, meet, overlapping, slices, volume
from quintet.skip_dynamo_import import uncompiled


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the bytes of a file that it is in."""

    key: str
    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint: full shape, type, and the chunks it was written in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class Reader:
    """A checkpoint's tensors by key. Reading needs memory for two chunks beside what is asked for.

    Raises UserError naming the file for what cannot be read or is not a checkpoint; DamagedCheckpoint for files that are missing
    or not as `checksums.json` says. A checkpoint that megatron-core wrote has none: there the places of tensors are checked.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if _size(self.path / INDEX) is None:
            # Where the directory itself is not there, it may be that of a file system that this machine has not mounted.
            kind = DamagedCheckpoint if self.path.is_dir() else UserError
            raise kind(f"{self.path} is not a checkpoint: it has no {INDEX}")
        self._apart: set[str] = set()
        self._sums = self._read_checksums()
        self.tensors = self._read_index()
        self._check_places()

    @property
    def checked(self) -> bool:
        """Whether there are checksums to hold the files to."""
        return bool(self._sums)

    def state(self) -> dict[str, Any]:
        """Return the content of state.json; empty where megatron-core wrote the checkpoint."""
        return self.json(STATE) if _size(self.path / STATE) is not None else {}

    def json(self, name: str) -> dict[str, Any]:
        """Return one of the JSON files."""
        return _json(self.path / name, self._bytes(name))

    def meeting(self, key: str, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """Yield the chunks that share elements with a box of a tensor, and what they share.

        Raises UserError when they do not make up the whole box, each element once.
        """
        self._check_apart(key)
        missing = volume(box)
        for chunk in self.tensors[key].chunks:
            part = meet(box, chunk.box)
            if part is not None:
                missing -= volume(part)
                yield chunk, part
        if missing:
            raise UserError(f"{self.path / INDEX}: {missing} elements of {key} in {box} are in no file")

    def read(self, chunk: Chunk) -> Tensor:
        """Return all of a chunk, in its box's shape.

        Raises DamagedCheckpoint naming file and tensor when the bytes are not those that were written.
        """
        file = self.path / chunk.file
        try:
            with file.open("rb") as stream:
                stream.seek(chunk.offset)
                data = stream.read(chunk.length)
        except OSError as error:
            raise UserError(f"{file}: cannot read {chunk.key}: {error.strerror}") from None
        wanted = self._sums.get("tensors", {}).get(chunk.file, {}).get(str(chunk.offset))
        if len(data) != chunk.length or (self._sums and zlib.crc32(data) != wanted):
            raise DamagedCheckpoint(
                f"{file}: {chunk.key} is damaged: its checksum is not the one it was written with"
            )
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes lead anywhere
            raise UserError(f"{file}: {chunk.key} is not a tensor: {_first_line(error)}") from None
        sizes = box_sizes(chunk.box)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes:
            raise UserError(f"{file}: {chunk.key} is not a tensor of shape {sizes}")
        return tensor

    def read_box(self, key: str, box: Box) -> Tensor:
        """Return a box of a tensor, in the type it was written in."""
        out = torch.empty(box_sizes(box), dtype=self.tensors[key].dtype)
        for chunk, part in self.meeting(key, box):
            within(out, box, part).copy_(within(self.read(chunk), chunk.box, part))
        return out

    def _read_checksums(self) -> dict[str, Any]:
        file = self.path / CHECKSUMS
        if _size(file) is None:
            return {}
        sums = _json(file, _content(file))
        try:
            sizes = {name: int(known["bytes"]) for name, known in sums["files"].items()}
            sums["tensors"].items()
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DamagedCheckpoint(f"{file} is damaged: it lacks sizes or checksums") from None
        for name, size in sizes.items():
            one = self.path / name
            found = _size(one)
            if found is None:
                raise DamagedCheckpoint(f"{one} is missing")
            if found != size:
                raise DamagedCheckpoint(f"{one} has {found} bytes, and was written with {size}")
        return sums

    def _bytes(self, name: str) -> bytes:
        """Content of a file beside the tensors, checked."""
        data = _content(self.path / name)
        if self._sums and zlib.crc32(data) != self._sums["files"].get(name, {}).get("crc32"):
            raise DamagedCheckpoint(
                f"{self.path / name} is damaged: its checksum is not the one it was written with"
            )
        return data

    def _read_index(self) -> dict[str, Stored]:
        file = self.path / INDEX
        try:
            return _stored(unpickle(self._bytes(INDEX)))
        except pickle.UnpicklingError as error:
            raise UserError(f"{file} is refused: {error}") from None
        except UserError:
            raise
        except Exception as error:  # damaged bytes lead anywhere
            raise UserError(f"{file} is damaged: {_first_line(error)}") from None

    def _check_places(self) -> None:
        """Every chunk lies within a file of the checkpoint's own directory."""
        sizes: dict[str, int] = {}
        for key, stored in self.tensors.items():
            for chunk in stored.chunks:
                file = self.path / chunk.file
                if Path(chunk.file).name != chunk.file or "\0" in chunk.file:
                    raise UserError(
                        f"{self.path / INDEX}: {key} is said to be in {chunk.file}, outside the checkpoint"
                    )
                if chunk.file not in sizes:
                    size = _size(file)
                    if size is None:
                        raise DamagedCheckpoint(f"{file} is missing: {key} is in it")
                    sizes[chunk.file] = size
                if chunk.offset + chunk.length > sizes[chunk.file]:
                    raise DamagedCheckpoint(f"{file} is cut short: {key} lies beyond its end")

    def _check_apart(self, key: str) -> None:
        """No two chunks of a tensor hold the same element. Once a tensor."""
        if key in self._apart:
            return
        twice = overlapping([chunk.box for chunk in self.tensors[key].chunks])
        if twice:
            raise UserError(
                f"{self.path / INDEX} is damaged: {key} has elements of {twice[0]} in {twice[1]} again"
            )
        self._apart.add(key)


def within(tensor: Tensor, box: Box, part: Box) -> Tensor:
    """Return the view of the part of a box, given the box's tensor."""
    return tensor[slices(box, part)]


def _stored(index: Any) -> dict[str, Stored]:
    with uncompiled():
        from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    if not isinstance(index, Metadata):
        raise ValueError("it holds no checkpoint metadata")
    places = {(at.fqn, tuple(at.offset or ())): place for at, place in index.storage_data.items()}
    found = {}
    for key, tensor in index.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue  # an object of core's, such as TransformerEngine's FP8 state
        chunks = []
        for one in tensor.chunks:
            place = places[key, tuple(one.offsets)]
            box = tuple((start, start + n) for start, n in zip(one.offsets, one.sizes, strict=True))
            chunks.append(Chunk(key, box, place.relative_path, place.offset, place.length))
        found[key] = Stored(tuple(tensor.size), tensor.properties.dtype, tuple(chunks))
        _check_types(key, found[key])
    return found


def _check_types(key: str, stored: Stored) -> None:
    """Raises ValueError for what no writer would say of a tensor. Pickles hold anything, whatever the classes promise."""
    fits = isinstance(key, str) and isinstance(stored.dtype, torch.dtype) and _counts(stored.shape)
    for chunk in stored.chunks:
        fits = fits and isinstance(chunk.file, str) and _counts((chunk.offset, chunk.length))
        fits = fits and len(chunk.box) == len(stored.shape) and _counts(n for ends in chunk.box for n in ends)
        if not fits or any(b < a or b > n for (a, b), n in zip(chunk.box, stored.shape, strict=True)):
            raise ValueError(f"{key!r} is not described as a tensor and the boxes of it")
    if not fits:
        raise ValueError(f"{key!r} is not described as a tensor")


def _counts(numbers: Iterable[Any]) -> bool:
    return all(type(one) is int and one >= 0 for one in numbers)


def _size(file: Path) -> int | None:
    """Bytes of a file; None where there is no such file, which is not to be said where the file system does not answer."""
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have that name
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _content(file: Path) -> bytes:
    with reading(file):
        return file.read_bytes()


def _json(file: Path, data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{file} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{file} is damaged: it is no JSON object")
    return content


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
