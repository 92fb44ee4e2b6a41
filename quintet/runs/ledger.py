"""The step ledger: metrics.jsonl, one flat JSON object a line, readable at any moment and after any death.

A line holds `stage` ("sft" or "rl"), `step`, and numbers or null. What the clock decides sits in keys of its
own (CLOCK_KEYS), so that everything else repeats bit by bit with the same seed.
JSON has no infinities and no NaN: they are written as the texts "inf", "-inf" and "nan" and read back as numbers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from quintet.errors import UserError

CLOCK_KEYS = (
    *("seconds/", "tokens_per_s", "memory/", "sync/seconds", "sync/proof_seconds"),
    "rollout/tail_idle_fraction",
)
"""Prefixes of the keys whose values differ from run to run."""
OF_REWARDS = frozenset({"mean", "std", "timed_out", "failed", "overlong_penalty"})
"""reward/… of a run's own: what a reward function returns has other names."""


class Ledger:
    """Appends lines of metrics to a file; each is on its way to the disk before `write` returns.

    Raises UserError when the disk does not take a line.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)

    def write(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line. Values are numbers or null; numpy and 0-dim tensors become plain numbers."""
        line = {"stage": stage, "step": step} | {key: _plain(key, value) for key, value in metrics.items()}
        append(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def open_to_append(path: Path) -> FileIO:
    """Open a file to append to it, without a buffer: what a full disk refuses is told by the write and not once more when the
    file is closed."""
    return path.open("ab", buffering=0)


def append(file: FileIO, data: bytes) -> None:
    """Write all of it, or nothing. Raises UserError when the disk does not take it."""
    before = os.fstat(file.fileno()).st_size
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        with contextlib.suppress(OSError):
            file.truncate(before)  # half a record would hide those that come after it
        raise UserError(f"{file.name} cannot be written: {error.strerror}") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger. A last line cut short by the end of its run is left out; a missing file has none."""
    return [
        {key: float(value) if value in ("inf", "-inf", "nan") else value for key, value in line.items()}
        for line in read_jsonl(path)
    ]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return JSON objects of a file, one a line, up to the first line that is not whole."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            value = json.loads(line)
        except ValueError:
            break
        if isinstance(value, dict):
            lines.append(value)
    return lines


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file of a run directory holds; {} where there is none, or none that is whole."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _plain(key: str, value: Any) -> int | float | str | None:
    if value is None or isinstance(value, int):
        return value if value is None else int(value)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {key} must be a number or None, got {value!r}") from error
    return number if math.isfinite(number) else str(number)
