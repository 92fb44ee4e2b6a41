"""The header of a safetensors file: which tensors it holds and where. No weight is read, no torch.

Format: 8 bytes with the header's length (little endian), the header (JSON: name → dtype, shape, offsets), the data.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quintet.errors import UserError, reading
from quintet.models import fp8_blocks

DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, fp8_blocks.DTYPE: 1}
"""Types of a weight that can be read, and their bytes; 8 bits with the scales of their blocks. Other quantized weights would come out
as nonsense."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. start, stop: where its bytes lie, counted from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself. metadata: its free text, such as the checksums that quintet writes."""

    tensors: dict[str, Entry]
    metadata: dict[str, str] = field(default_factory=dict)


def read_header(file: Path) -> Header:
    """Return the header of a safetensors file, which has to describe every byte of the file exactly once: safetensors sees to
    that.

    Raises UserError naming the file.
    """
    try:
        with (
            reading(file),
            safe_open(file, framework="np"),
            file.open("rb") as f,
        ):  # safe_open looks it through
            length = int.from_bytes(f.read(8), "little")
            content = json.loads(f.read(length))
    except SafetensorError as error:
        raise UserError(f"{file}: not a sound safetensors file ({error!s:.200}); download it again") from None
    metadata = content.pop("__metadata__", None) or {}
    return Header({name: _entry(one, 8 + length) for name, one in content.items()}, metadata)


def _entry(one: dict[str, Any], data: int) -> Entry:
    """data: where in the file the header's offsets count from."""
    start, stop = one["data_offsets"]
    return Entry(one["dtype"], tuple(one["shape"]), data + start, data + stop)
