"""The samples of a report: all of a run as data in the page, which its script shows, filters and searches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 8_000_000
"""Of samples with more than this only those of every so many steps are in the page, which says so."""
_KEYS = ("step", "kind", "response", "answer", "reward", "correct", "finish", "metrics")


def samples_section(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of these samples as HTML, "" where there are none. Their text is JSON in it, and never HTML."""
    if not samples:
        return ""
    kept = _thinned(samples)
    prompts: dict[str, int] = {}
    rows = [
        {key: one[key] for key in _KEYS if one.get(key) not in (None, "")}
        | {"prompt": prompts.setdefault(str(one.get("prompt", "")), len(prompts))}
        for one in kept
    ]
    note = f"in this page, of {len(samples)} in samples.jsonl" if len(kept) < len(samples) else ""
    data = json.dumps({"prompts": list(prompts), "samples": rows, "note": note}, ensure_ascii=False)
    # No "<": nothing in it can end the script, or begin another.
    escaped = data.replace("<", "\\u003c")
    controls = Path(__file__).with_name("samples.html").read_text(encoding="utf-8")
    return f'{controls}<script type="application/json" id="samples-data">{escaped}</script>'


def _thinned(samples: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """All of them, or where they are too much for a page those of every so many steps, the last one's among them."""
    size = sum(len(str(one.get("prompt", ""))) + len(str(one.get("response", ""))) + 200 for one in samples)
    steps = sorted({one.get("step", 0) for one in samples}, reverse=True)
    kept = set(steps[:: max(1, math.ceil(size / MOST_CHARACTERS))])
    return [one for one in samples if one.get("step", 0) in kept]
