"""The header of a safetensors file: which tensors it holds and where. No weight is read, no torch.

Format: 8 bytes with the header's length (little endian), the header (JSON: name → dtype, shape, offsets), the data.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.errors import UserError

DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of a weight that can be read, and their bytes. Quantized weights would come out as nonsense."""

_OTHER_DTYPES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MOST_HEADER_BYTES = 32 << 20
"""Three times that of a file with every tensor of the largest models; the format would allow 100 MB."""
_MOST_DIMS = 8


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. start, stop: where its bytes lie, counted from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Header:
    """What a file says about itself. metadata: its free text, such as the checksums that quintet writes."""

    tensors: dict[str, Entry]
    metadata: dict[str, str] = field(default_factory=dict)


class _Damaged(ValueError):
    """What is wrong with a header, in words."""


def read_header(file: Path) -> Header:
    """The header of a safetensors file, which has to describe every byte of the file exactly once.

    Raises UserError naming the file, and the tensor where one is wrong.
    """
    try:
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise UserError(
                    f"{file}: not a readable safetensors file ({size} bytes, no whole header); download it again"
                )
            return parse_header(f.read(length), size)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except _Damaged as error:
        raise UserError(f"{file}: {error}; download it again") from None


def parse_header(text: bytes, size: int) -> Header:
    """A header's JSON, of a file of `size` bytes. Raises ValueError saying what is wrong."""
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique)
        metadata = content.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError
        found = {name: _entry(name, one, 8 + len(text)) for name, one in content.items()}
    except _Damaged:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _Damaged("not a readable safetensors file (its header is damaged)") from None
    end = 8 + len(text)
    for name, one in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if one.start != end:
            kind = "overlaps with what is before it" if one.start < end else "leaves a gap before it"
            raise _Damaged(f"its header is damaged: {name} {kind}")
        end = one.stop
    if size < end:
        raise _Damaged(f"cut short, {size} of {end} bytes are there")
    if size > end:
        raise _Damaged(f"{size - end} bytes at its end belong to no tensor")
    return Header(found, metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _Damaged(f"its header is damaged: {twice} is there twice")
    return found


def _entry(name: str, one: dict[str, Any], data: int) -> Entry:
    """data: where in the file the header's offsets count from."""
    dtype, shape, offsets = one["dtype"], tuple(one["shape"]), tuple(one["data_offsets"])
    whole = all(type(n) is int and n >= 0 for n in (*shape, *offsets))
    sized = len(offsets) == 2 and len(shape) <= _MOST_DIMS
    if len(one) != 3 or not isinstance(dtype, str) or not whole or not sized:
        raise _Damaged(f"its header is damaged: {name} has no sound dtype, shape and data_offsets")
    start, stop = offsets
    width = (DTYPES | _OTHER_DTYPES).get(dtype)
    if start > stop or (width is not None and math.prod(shape) * width != stop - start):
        raise _Damaged(f"its header is damaged: shape and offsets of {name} disagree")
    return Entry(dtype, shape, data + start, data + stop)
