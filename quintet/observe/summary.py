"""What a run came to: summary.json, and the table printed at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from quintet.observe.numbers import change, duration, percent, points, short
from quintet.observe.signal import nothing_learnt

NAMES = {
    "accuracy": {"accuracy": "eval", "greedy": "greedy", "well_formed": "well_formed"},
    "reward": {"reward": "eval", "greedy_reward": "greedy", "well_formed": "well_formed"},
}
"""By what `eval` and `greedy` are of: number of an evaluation → name in the summary, where it appears with _before and _after."""


class Row(NamedTuple):
    """A number of the evaluations as people read it, before and after. style: "up", "down", or "" where neither is better."""

    label: str
    before: str
    after: str
    change: str
    style: str


RUNNING = "running"
"""Status of a run that had not ended when its summary was written."""


def summarize(
    lines: list[dict[str, Any]], seconds_total: float, seconds_by_phase: Mapping[str, float]
) -> dict[str, Any]:
    """Sum up the ledger's lines.

    `*_before` is the first evaluation of the run's main stage, `*_after` its last one; null where there was
    none. `eval_is` says whether `eval` and `greedy` are an accuracy or a mean reward, and `evaluation` has all numbers of the
    two. `steps` and `tokens_trained` (tokens with loss_mask 1) count the main stage: rl where there is one,
    otherwise sft.
    """
    stage = main_stage(lines)
    main = [line for line in lines if line.get("stage") == stage]
    steps = [line for line in main if "loss" in line or "tokens" in line]
    evaluations = [found for line in main if (found := _evaluation(line))]
    first, last = (evaluations or [{}])[0], evaluations[-1] if len(evaluations) > 1 else {}
    kind = "accuracy" if any("accuracy" in one for one in evaluations) or not evaluations else "reward"
    summary: dict[str, Any] = {}
    for key, name in NAMES[kind].items():
        summary[f"{name}_before"], summary[f"{name}_after"] = first.get(key), last.get(key)
    summary["eval_is"] = kind
    summary["evaluation"] = {
        name: {"before": first.get(name), "after": last.get(name)} for name in first | last
    }
    summary["steps"] = len(steps)
    summary["tokens_trained"] = _trained(steps)
    if (why := nothing_learnt(steps)) is not None:
        summary["nothing_learnt"] = why
    if warm_up := [line for line in lines if line.get("stage") == "sft" and stage != "sft"]:
        summary |= {"sft_steps": len(warm_up), "sft_tokens_trained": _trained(warm_up)}
    summary["ledger_lines"] = len(lines)
    summary["written"] = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    summary["seconds_total"] = round(seconds_total, 3)
    summary["seconds_by_phase"] = {phase: round(seconds, 3) for phase, seconds in seconds_by_phase.items()}
    for key in ("host_gib", "device_gib"):
        peaks = [line[f"memory/{key}"] for line in lines if line.get(f"memory/{key}") is not None]
        summary[f"{key}_peak"] = round(max(peaks), 3) if peaks else None
    return summary


def _evaluation(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}


def _trained(lines: list[dict[str, Any]]) -> int:
    return int(sum(line.get("tokens_trained") or 0 for line in lines))


def main_stage(lines: list[dict[str, Any]]) -> str:
    """Return the main stage: rl where the run got that far, otherwise sft."""
    return "rl" if not lines or any(line.get("stage") == "rl" for line in lines) else "sft"


def closing_table(summary: Mapping[str, Any]) -> Table:
    """Return the table a run ends with: before and after, what it took, and where everything is."""
    title = f"Run {summary.get('status', 'finished')} after {short(summary.get('steps', 0))} steps"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=True, expand=False)
    table.add_column("")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for row in rows(summary):
        style = {"up": "green", "down": "red"}.get(row.style)
        shown = f"[{style}]{row.change}[/]" if style else row.change
        table.add_row(escape(row.label), row.before, row.after, shown)
    table.add_section()
    for label, value in _facts(summary):
        table.add_row(label, "", value, "")
    return table


def rows(summary: Mapping[str, Any]) -> list[Row]:
    """Return the numbers of the first and the last evaluation: accuracies in percent, with the change in points; rewards and
    what else a reward told as they are. A reward that is the accuracy again is left out."""
    kind = summary.get("eval_is", "accuracy")
    numbers = dict(summary.get("evaluation") or {})
    found = []
    for label, name, share in (
        (f"{kind}, sampled", "eval", kind == "accuracy"),
        (f"{kind}, greedy", "greedy", kind == "accuracy"),
        ("well-formed answers", "well_formed", True),
    ):
        found.append((label, summary.get(f"{name}_before"), summary.get(f"{name}_after"), share, True))
    if kind == "accuracy":
        for name, label, same in (
            ("reward", "reward, sampled", "accuracy"),
            ("greedy_reward", "reward, greedy", "greedy"),
        ):
            if name in numbers and numbers[name] != numbers.get(same):
                found.append((label, numbers[name]["before"], numbers[name]["after"], False, True))
    for name, one in numbers.items():
        if name.startswith("reward/"):
            found.append((name.removeprefix("reward/"), one["before"], one["after"], False, False))
    return [_row(*one) for one in found if one[1] is not None or one[2] is not None]


def _row(label: str, before: float | None, after: float | None, share: bool, better: bool) -> Row:
    show, differ = (percent, points) if share else (short, change)
    text = differ(before, after)
    moved = better and text.strip("+-0.") != ""
    style = {"+": "up", "-": "down"}.get(text[0], "") if moved else ""
    return Row(label, show(before), show(after), text, style)


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    by_phase = summary.get("seconds_by_phase") or {}
    return [
        ("tokens trained on", short(summary.get("tokens_trained"))),
        ("wall time", duration(summary.get("seconds_total") or 0)),
        *((f"  {phase}", duration(seconds)) for phase, seconds in by_phase.items()),
        *peaks(summary),
    ]


def peaks(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the memory peaks there are, each with its label."""
    labels = {"host_gib_peak": "host memory peak", "device_gib_peak": "device memory peak"}
    return [
        (label, f"{summary[key]:.1f} GiB") for key, label in labels.items() if summary.get(key) is not None
    ]
