"""Keeps what `benchmarks.gsm8k` came to: its records, and docs/gsm8k.md with the curve and ten answered questions.

    python -m benchmarks.gsm8k_page runs/gsm8k/smollm2-135m/full/gsm8k.json runs/gsm8k/smollm2-135m/lora/gsm8k.json

A run takes the place of the last one of its kind, all weights or adapters alone; the other's records and part of the page stay.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gsm8k import LOADED, TRAINED, WARM
from benchmarks.records import RESULTS, ROOT, read_records, write_records

FILE = RESULTS / "gsm8k.json"
PAGE = ROOT / "docs" / "gsm8k.md"
ROWS = {LOADED: "as loaded", WARM: "after the warm-up (SFT)", TRAINED: "after GRPO"}
TITLES = {False: "All weights", True: "Adapters alone (LoRA)"}
"""By whether adapters are trained alone, in the page's order."""
POINTS = 12
"""Of a curve, each a mean over as many steps."""
BAR = 40
MOST_CHARACTERS = 700
HEAD = """# A model that ends better: SmolLM2-135M on GSM8K

One run of [recipes/smollm2_gsm8k_1gpu.yaml](../recipes/smollm2_gsm8k_1gpu.yaml) on one GPU, measured by `python -m benchmarks.gsm8k`: all 1,319 test
questions, with the same prompt, as the model was loaded, after a warm-up by SFT on the worked solutions of the training questions, and after GRPO on
those questions. Greedy is one answer a question, sampled the mean of four at temperature 1. [benchmarks/README.md](../benchmarks/README.md) says how it
is measured; this page is made by `python -m benchmarks.gsm8k_page`.
"""


def section(told: Mapping[str, Any]) -> str:
    """Return the page's part of one run, its gsm8k.json: accuracies, how certain the gain is, the curve and the samples."""
    records = told["records"]
    title = TITLES[told["recipe"].get("lora") is not None]
    found = {(one["case"].split("/", 2)[2], one["metric"]): one["value"] for one in records}
    lines = [f"## {title}\n", "| | greedy | sampled | tokens a response |", "|---|---|---|---|"]
    for name, said in ROWS.items():
        shares = [f"{found[name, f'{kind}_accuracy']:.2%}" for kind in ("greedy", "sampled")]
        lines.append(f"| {said} | {' | '.join(shares)} | {found[name, 'response_tokens']:.0f} |")
    lines.append("")
    for kind in ("greedy", "sampled"):
        gain, low, high, p = (
            found[TRAINED, f"{kind}_{one}"] for one in ("gain", "gain_low", "gain_high", "p")
        )
        lines.append(
            f"- {kind.capitalize()}, GRPO gained {100 * gain:+.2f} points over the warm-up (95% within {100 * low:+.2f} to {100 * high:+.2f}), "
            f"one-sided p = {p:.2g} by a bootstrap over questions."
        )
    origin = records[0]
    lines.append(
        f"- {found[TRAINED, 'steps']:.0f} steps of GRPO, {found[TRAINED, 'step_s']:.2f} s each (median), on {origin['hardware']}, "
        f"{origin['date']}, commit {origin['commit']}: `{origin['command']}`.\n"
    )
    lines += [*curve(told["curve"]["rl"]), *samples(told["samples"])]
    return "\n".join(lines)


def curve(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the share of right samples among those trained on, as a table with a bar a line."""
    size = -(-len(steps) // POINTS)
    some = [steps[at : at + size] for at in range(0, len(steps), size)]
    means = [statistics.fmean(one["reward"] for one in part) for part in some]
    lines = ["| steps | right, of the samples trained on | tokens | |", "|---|---|---|---|"]
    for part, mean in zip(some, means, strict=True):
        tokens = statistics.fmean(one["response_tokens"] for one in part)
        bar = "█" * round(BAR * mean / max(max(means), 1e-9))
        lines.append(f"| {part[0]['step']}–{part[-1]['step']} | {mean:.2%} | {tokens:.0f} | {bar} |")
    return [*lines, ""]


def samples(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return questions with the greedy answers of each row."""
    lines = ["Questions spread over the file, and the first that GRPO alone got right, answered greedily:\n"]
    for one in shown:
        marks = ", ".join(f"{ROWS[name]} {_mark(said)}" for name, said in one["responses"].items())
        lines += [
            "<details>",
            f"<summary>Test question {one['question']} (answer {one['answer']}): {marks}</summary>\n",
        ]
        lines += [*_quoted(one["prompt"])]
        for name, said in one["responses"].items():
            lines += [f"{ROWS[name][0].upper()}{ROWS[name][1:]} {_mark(said)}:\n", *_quoted(said["text"])]
        lines.append("</details>\n")
    return lines


def _mark(said: Mapping[str, Any]) -> str:
    return "✓" if said["right"] else "✗"


def _quoted(text: str) -> list[str]:
    cut = text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " …"
    return ["~~~~text", cut.strip(), "~~~~", ""]


def page(told: Sequence[Mapping[str, Any]], before: str = "") -> str:
    """Return the page of these runs. before: the page as it was, whose part of a run that is not among these stays."""
    parts = re.split(rf"^(?=## (?:{'|'.join(map(re.escape, TITLES.values()))})$)", before, flags=re.MULTILINE)
    by_title = {
        title: one
        for one in [*parts, *map(section, told)]
        for title in TITLES.values()
        if one.startswith(f"## {title}\n")
    }
    found = [by_title[title].rstrip() + "\n" for title in TITLES.values() if title in by_title]
    return "\n".join([HEAD, *found])


def replaced(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records, those of a run in place of all that its kind had: a shorter one has fewer of its curve."""
    places = [_place(one) for one in new]
    return [*(one for one in old if _place(one) not in places), *new]


def _place(one: Mapping[str, Any]) -> list[str]:
    """A record's model, and whether all its weights are trained."""
    return one["case"].split("/")[:2]


def main(argv: Sequence[str] | None = None) -> int:
    """Keep the records of the files, and write the page."""
    files = [Path(word) for word in (sys.argv[1:] if argv is None else argv)]
    if not files or not all(file.is_file() for file in files):
        print(__doc__, file=sys.stderr)
        return 2
    told = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    text = page(told, PAGE.read_text(encoding="utf-8") if PAGE.exists() else "")
    old = read_records(FILE) if FILE.exists() else []
    write_records(FILE, replaced(old, [record for one in told for record in one["records"]]))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
