"""Checksums of weights on disk: those quintet writes into its safetensors files, and those the hub keeps beside them.

safetensors files carry none of their own. quintet's have the CRC-32 of each tensor's bytes in the header's metadata,
one for every BLOCK_BYTES from the tensor's start, so that a rank that reads some rows can check them without the rest.
The Hugging Face hub names large files by their SHA-256 and small ones as git does; both of its layouts on disk, the
cache and `hf download --local-dir`, keep that name.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quintet.errors import UserError, reading
from quintet.models.safetensors_header import Header, read_header

KEY = "quintet.crc32"
BLOCK_BYTES = 1 << 18

_TEXTS = (".json", ".txt", ".model", ".jinja")  # what stands beside weights and says what they mean

_DIGITS = 8  # of a CRC-32 in hexadecimal

Bytes = bytes | bytearray | memoryview


def block_count(nbytes: int) -> int:
    """Return how many checksums there are of a tensor of so many bytes."""
    return -(-nbytes // BLOCK_BYTES)


def block_sums(data: Bytes) -> str:
    """Return the checksums of a tensor's bytes, or of a part that starts on a block, as they are written."""
    view = memoryview(data).cast("B")
    starts = range(0, len(view), BLOCK_BYTES)
    return "".join(f"{zlib.crc32(view[start : start + BLOCK_BYTES]):08x}" for start in starts)


def as_metadata(sums: dict[str, str]) -> str:
    """Return what stands under KEY for the tensors of a file. Its length follows from names and sizes alone."""
    return json.dumps({"block_bytes": BLOCK_BYTES, "tensors": sums}, separators=(",", ":"))


def recorded_sums(header: Header, file: Path) -> dict[str, list[int]] | None:
    """Return the checksums of each tensor's blocks, or None for a file without any.

    Raises UserError naming file and tensor when the checksums do not fit the tensors.
    """
    if KEY not in header.metadata:
        return None
    try:
        content = json.loads(header.metadata[KEY])
        block, texts = content["block_bytes"], content["tensors"]
        if not isinstance(texts, dict) or block != BLOCK_BYTES:
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f"{file}: its checksums ({KEY}) are damaged; get the file again") from None
    found = {}
    for name, entry in header.tensors.items():
        text, digits = texts.get(name), _DIGITS * block_count(entry.stop - entry.start)
        if not isinstance(text, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", text):
            raise UserError(f"{file}: the checksums ({KEY}) of {name} are damaged; get the file again")
        found[name] = [int(text[at : at + _DIGITS], 16) for at in range(0, digits, _DIGITS)]
    return found


def damaged(file: Path, name: str) -> UserError:
    """Return the error of a tensor whose bytes are not those its checksum was made of."""
    return UserError(
        f"{file}: {name} is damaged: its bytes do not fit the checksum they were written with; get the file again"
    )


def hub_digest(file: Path) -> str | None:
    """Return what the hub calls a file: 64 hexadecimal digits of its SHA-256, or 40 of git's blob id; None when not at hand."""
    if file.is_symlink() and file.resolve().parent.name == "blobs":
        name = file.resolve().name
    else:
        note = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
        if not note.is_file():
            return None
        lines = note.read_text(encoding="utf-8", errors="replace").splitlines()
        name = lines[1].strip().strip('"') if len(lines) > 1 else ""
    return name if re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", name) else None


def verify_files(
    path: Path, weights: list[Path], tell: Callable[[str], None] = lambda text: None
) -> list[str]:
    """Read every byte of a directory's weights, and of other files that the hub's digests are there for, against the
    checksums; returns what could not be verified, a line a file.

    tell: is told of each file that is about to be read. Raises UserError naming the file, and the tensor where
    it is known.
    """
    notes = []
    for file in [*weights, *sorted(one for one in path.iterdir() if one.suffix in _TEXTS)]:
        digest = hub_digest(file)
        header = read_header(file) if file in weights else None
        sums = recorded_sums(header, file) if header else None
        if header and sums is None and digest is None:
            notes.append(
                f"{file}: no checksum of quintet's in it and none of the hub's beside it; not verified."
            )
        with reading(file):
            if header and sums is not None:
                tell(f"{file}: reading {len(sums)} tensors against their checksums")
                _verify_sums(file, header, sums)
            if digest is not None:
                tell(f"{file}: reading it against the hub's digest")
                _verify_digest(file, digest)
    return notes


def _verify_sums(file: Path, header: Header, sums: dict[str, list[int]]) -> None:
    def sound(name: str) -> bool:
        entry = header.tensors[name]
        with file.open("rb") as f:
            f.seek(entry.start)
            left = entry.stop - entry.start
            for wanted in sums[name]:
                block = f.read(min(left, BLOCK_BYTES))
                left -= len(block)
                if zlib.crc32(block) != wanted:
                    return False
        return True

    with ThreadPoolExecutor() as threads:
        for name, good in zip(sums, threads.map(sound, sums), strict=True):
            if not good:
                raise damaged(file, name)


def _verify_digest(file: Path, wanted: str) -> None:
    with file.open("rb") as f:
        if len(wanted) == 64:
            found, kind = hashlib.file_digest(f, "sha256").hexdigest(), "SHA-256"
        else:
            blob = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
            found, kind = hashlib.file_digest(f, lambda: blob).hexdigest(), "git blob id"
    if found != wanted:
        raise UserError(
            f"{file} is damaged: its {kind} is {found}, the hub's is {wanted}; remove it and download it again"
        )
