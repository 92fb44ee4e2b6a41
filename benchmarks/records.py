"""Benchmark records: what was measured, against what, on what, and by which command.

`benchmarks/results/<bench>.json` is a list of records; the benchmark page of the docs is generated from them and nothing else.
A new measurement replaces the one of the same case, metric and hardware: the older one is in git's history.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "megatron-core", "transformers", "ray")


def hardware() -> str:
    """The GPUs if there are any, else the processor, with the count this process may use."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPU, {cores} cores, {_processor()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide speed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit measured, with `+changes` when the working tree differs from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+changes" if changed else "")


@dataclass(frozen=True)
class Record:
    """One number. `baseline` is the same metric, in the same run, of what it is compared with; null without one."""

    bench: str
    case: str
    """Shape and variant, with a slash between: `short/trl`."""
    metric: str
    value: float
    unit: str
    command: str
    """What reproduces it, run in the repository's root."""
    baseline: float | None = None
    hardware: str = field(default_factory=hardware)
    versions: dict[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())

    def __post_init__(self) -> None:
        for name in ("bench", "case", "metric", "unit", "command", "hardware", "commit"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"record {self.bench}/{self.case}: {name} must be a text that says something, found {text!r}"
                )
        for name in ("value", "baseline"):
            number = getattr(self, name)
            if number is None and name == "baseline":
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError(
                    f"record {self.bench}/{self.case}: {name} must be a finite number, found {number!r}"
                )
        if not self.versions or not all(
            isinstance(part, str) for pair in self.versions.items() for part in pair
        ):
            raise ValueError(f"record {self.bench}/{self.case}: versions must map package names to versions")
        datetime.fromisoformat(self.date)


def read_records(file: Path) -> list[Record]:
    """The records of one results file.

    Raises:
        ValueError: not a list of records with exactly the known keys, or a value out of bounds.
    """
    rows = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"{file}: a list of records was expected")
    keys = set(Record.__dataclass_fields__)
    for row in rows:
        if not isinstance(row, dict) or set(row) != keys:
            raise ValueError(f"{file}: each record has the keys {sorted(keys)}, found {row!r}")
    return [Record(**row) for row in rows]


def write_records(records: Iterable[Record], folder: Path = RESULTS) -> list[Path]:
    """Merge records into `folder/<bench>.json`, one file a bench; return the files."""
    new = list(records)
    files = []
    for bench in sorted({record.bench for record in new}):
        file = folder / f"{bench}.json"
        merged = {_key(record): record for record in (read_records(file) if file.exists() else [])}
        merged |= {_key(record): record for record in new if record.bench == bench}
        folder.mkdir(parents=True, exist_ok=True)
        rows = [asdict(merged[key]) for key in sorted(merged)]
        file.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        files.append(file)
    return files


def _key(record: Record) -> tuple[str, str, str]:
    return record.case, record.metric, record.hardware
