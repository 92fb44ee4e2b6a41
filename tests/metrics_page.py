"""The metrics that docs/metrics.md names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
PLACE = ("stage", "step")
"""What every line has besides metrics."""


@functools.cache
def named() -> list[str]:
    """Metrics of the tables' first column, with <words> where names vary."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for row in rows:
        metric, unit, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
        assert unit, metric
        assert meaning, metric
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def undocumented(metrics: Iterable[str]) -> set[str]:
    """Those of these metrics that the page does not name."""
    patterns = [
        re.sub(r"<\w+>", "[^/]+", re.escape(one).replace(r"\<", "<").replace(r"\>", ">")) for one in named()
    ]
    return {one for one in metrics if one not in PLACE and not any(re.fullmatch(p, one) for p in patterns)}
