"""What safetensors files in a Hugging Face directory hold, from their headers alone: no weight is read, no torch.

Format: 8 bytes with the header's length (little endian), the header (JSON: name → dtype, shape, offsets), the data.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.errors import UserError
from quintet.models.family import family_named, read_shape
from quintet.models.hf_config import read_json
from quintet.models.shape import ModelShape

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the config."""

DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of a weight that can be read, and their bytes. Quantized weights would come out as nonsense."""

VALUE_HEAD = "score.weight"
"""The head of a value model, which starts at zero where a checkpoint has none."""

_MOST_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]


def weight_files(path: Path) -> dict[str, Path]:
    """Which file holds each tensor of a Hugging Face directory.

    Raises UserError when there are no weights, or the index is malformed or names a file that is not there.
    """
    path = Path(path)
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return dict.fromkeys(read_header(single), single)
        raise UserError(f"{path}: neither model.safetensors nor model.safetensors.index.json is there")
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) and file for file in names.values()):
        raise UserError(f'{index}: expected a "weight_map" object that maps tensor names to file names')
    for file in sorted(set(names.values())):
        if not (path / file).is_file():
            raise UserError(f"{path / file} is missing: {index} names it; download it again")
    return {name: path / file for name, file in names.items()}


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file.

    Raises UserError naming the file when it is not one, or shorter than its header says.
    """
    try:
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise UserError(f"{file}: not a readable safetensors file ({size} bytes, no whole header)")
            header = json.loads(f.read(length))
        found = {name: _entry(one) for name, one in header.items() if name != "__metadata__"}
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        end = 8 + length + max(ends, default=0)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise UserError(f"{file}: not a readable safetensors file (its header is damaged)") from None
    if size < end:
        raise UserError(f"{file}: cut short, {size} of {end} bytes are there; download it again")
    return found


def _entry(one: dict[str, Any]) -> Entry:
    shape = tuple(one["shape"])
    begin, end = one["data_offsets"]
    held = math.prod(shape) * DTYPES.get(one["dtype"], 0)
    if one["dtype"] in DTYPES and held != end - begin:
        raise ValueError("shape and offsets disagree")
    return Entry(str(one["dtype"]), shape)


def check_names(names: set[str], shape: ModelShape, where: Path) -> None:
    """Every tensor accounted for: none missing, none left over.

    Layers for multi-token prediction, which DeepSeek-V3 numbers on from the last one, are passed over: they are no
    part of the policy that is trained, and what predicts from a stale copy of it is left out of saved models.

    A value model may start from a language model: it then leaves the LM head and has no head of its own yet. A directory
    that says it holds a value model has one.

    where: the directory. Raises UserError listing what is missing and what has no place.
    """
    wanted = {name for weight in family_named(shape.family).weights(shape) for name in weight.hf}
    spare = {"lm_head.weight"} if shape.tied_embeddings or shape.head == "value" else set()
    starts = shape.head == "value" and read_shape(where).head == "lm"
    missing = sorted(wanted - names - ({VALUE_HEAD} if starts else set()))
    ahead = tuple(f"model.layers.{shape.layers + i}." for i in range(shape.mtp_layers))
    extra = sorted(
        n for n in names - wanted - spare if not n.endswith(IGNORED_SUFFIXES) and not n.startswith(ahead)
    )
    if missing or extra:
        said = [f"missing: {_listed(missing)}"] if missing else []
        said += [f"left over: {_listed(extra)}"] if extra else []
        raise UserError(
            f"{where}: tensors do not fit a {shape.family} model of this config; {'; '.join(said)}"
        )


def _listed(names: list[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_weights(path: Path, shape: ModelShape) -> None:
    """Names, shapes and types of all weights in a directory against what config.json implies; reads headers only.

    Raises UserError naming the file, and the tensor where one is wrong.
    """
    path = Path(path)
    file_of = weight_files(path)
    check_names(set(file_of), shape, path)
    headers = {file: read_header(file) for file in sorted(set(file_of.values()))}
    for weight in family_named(shape.family).weights(shape):
        for name, wanted in zip(weight.hf, weight.shapes, strict=True):
            if name == VALUE_HEAD and name not in file_of:
                continue
            file = file_of[name]
            entry = headers[file].get(name)
            if entry is None:
                raise UserError(f"{file}: {name} is not in it, though the index says so")
            if entry.shape != wanted:
                raise UserError(f"{file}: {name} has shape {entry.shape}, config.json implies {wanted}")
            if entry.dtype not in DTYPES:
                raise UserError(
                    f"{file}: {name} is of type {entry.dtype}; expected {', '.join(DTYPES)}: "
                    "quantized weights cannot be trained"
                )
