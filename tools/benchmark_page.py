"""Writes docs/benchmarks.md from the records in benchmarks/results, and from nothing else.

python tools/benchmark_page.py            # write it
python tools/benchmark_page.py --check    # exit 1 when it is not what the records say
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"

HEAD = """# Benchmarks

Every number here is a record of [benchmarks/results](../benchmarks/results), made by the command under its table; how each is
measured, and what it is compared with, is told in [benchmarks/README.md](../benchmarks/README.md). This page is made
by `python tools/benchmark_page.py`.
"""


def page() -> str:
    """The page as Markdown: a section a benchmark, a table for each hardware, set of versions, commit and command."""
    records: list[dict[str, Any]] = [
        r for file in sorted(RESULTS.glob("*.json")) for r in json.loads(file.read_text())
    ]
    lines = [HEAD]
    for bench, of_bench in groupby(records, key=lambda r: r["bench"]):
        lines.append(f"## {bench}\n")
        for origin, rows in groupby(of_bench, key=_origin):
            lines += ["| case | metric | value | baseline | ratio |", "|---|---|---|---|---|"]
            lines += [_row(r) for r in rows]
            lines.append(f"\n{origin}\n")
    return "\n".join(lines)


def _origin(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"`{record['command']}` on {record['hardware']}, {record['date']}, commit {record['commit']}; {versions}."


def _row(record: dict[str, Any]) -> str:
    value, baseline = record["value"], record["baseline"]
    ratio = f"{value / baseline:.3g}" if baseline else ""
    other = _number(baseline, record["unit"]) if baseline is not None else ""
    cells = (record["case"], record["metric"], _number(value, record["unit"]), other, ratio)
    return "| " + " | ".join(cells) + " |"


def _number(value: float, unit: str) -> str:
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return shown if unit == "fraction" else f"{shown} {unit}"


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
