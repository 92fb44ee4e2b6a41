"""What a run came to: summary.json, and the table printed at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from quintet.observe.numbers import duration, percent, points, short
from quintet.runs.directory import RunDirectory

EVALUATED = {"eval/accuracy": "eval", "eval/greedy": "greedy", "eval/well_formed": "well_formed"}
"""Metric of an evaluation → name in the summary, where it appears with _before and _after."""
ROWS = {"eval": "accuracy, sampled", "greedy": "accuracy, greedy", "well_formed": "well-formed answers"}


def summarize(
    lines: list[dict[str, Any]], seconds_total: float, seconds_by_phase: Mapping[str, float]
) -> dict[str, Any]:
    """Sum up the ledger's lines.

    `*_before` is the first evaluation of the run's main stage, `*_after` its last one; null where there was
    none. `steps` and `tokens_trained` (tokens with loss_mask 1) count the main stage: rl where there is one,
    otherwise sft.
    """
    stage = main_stage(lines)
    main = [line for line in lines if line.get("stage") == stage]
    steps = [line for line in main if "loss" in line or "tokens" in line]
    evaluations = [line for line in main if any(key in line for key in EVALUATED)]
    summary: dict[str, Any] = {}
    for key, name in EVALUATED.items():
        values = [line.get(key) for line in evaluations]
        summary[f"{name}_before"] = values[0] if values else None
        summary[f"{name}_after"] = values[-1] if len(values) > 1 else None
    summary["steps"] = len(steps)
    summary["tokens_trained"] = _trained(steps)
    warm_up = [line for line in lines if line.get("stage") == "sft" and stage != "sft"]
    if warm_up:
        summary["sft_steps"] = len(warm_up)
        summary["sft_tokens_trained"] = _trained(warm_up)
    summary["seconds_total"] = round(seconds_total, 3)
    summary["seconds_by_phase"] = {phase: round(seconds, 3) for phase, seconds in seconds_by_phase.items()}
    for key in ("host_gib", "device_gib"):
        peaks = [line[f"memory/{key}"] for line in lines if line.get(f"memory/{key}") is not None]
        summary[f"{key}_peak"] = round(max(peaks), 3) if peaks else None
    return summary


def _trained(lines: list[dict[str, Any]]) -> int:
    return int(sum(line.get("tokens_trained") or 0 for line in lines))


def main_stage(lines: list[dict[str, Any]]) -> str:
    """Return the main stage: rl where the run got that far, otherwise sft."""
    return "rl" if not lines or any(line.get("stage") == "rl" for line in lines) else "sft"


def closing_table(summary: Mapping[str, Any]) -> Table:
    """Return the table a run ends with: before and after, what it took, and where everything is."""
    table = Table(
        title=_title(summary), title_justify="left", title_style="bold", show_header=True, expand=False
    )
    table.add_column("")
    for column in ("before", "after", "points"):
        table.add_column(column, justify="right")
    for name, label in ROWS.items():
        before, after = summary.get(f"{name}_before"), summary.get(f"{name}_after")
        if before is not None or after is not None:
            gain = points(before, after)
            style = "green" if gain.startswith("+") else "red" if gain.startswith("-") else ""
            table.add_row(label, percent(before), percent(after), f"[{style}]{gain}[/]" if style else gain)
    table.add_section()
    for label, value in _facts(summary):
        table.add_row(label, "", value, "")
    return table


def where_to_look(directory: RunDirectory) -> list[str]:
    """Return the lines that say where the run's results are and how to open them; only what exists."""
    lines = [f"run directory   {directory.path}"]
    if directory.checkpoint.exists():
        lines.append(f"trained model   {directory.checkpoint}")
    if directory.report.exists():
        lines.append(f"report          open {directory.report} in a browser")
    return lines


def _title(summary: Mapping[str, Any]) -> str:
    status = summary.get("status", "finished")
    return f"Run {status} after {short(summary.get('steps', 0))} steps"


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("tokens trained on", short(summary.get("tokens_trained"))),
        ("wall time", duration(summary.get("seconds_total") or 0)),
    ]
    facts += [
        (f"  {phase}", duration(seconds))
        for phase, seconds in (summary.get("seconds_by_phase") or {}).items()
    ]
    return facts + peaks(summary)


def peaks(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the memory peaks there are, each with its label."""
    labels = {"host_gib_peak": "host memory peak", "device_gib_peak": "device memory peak"}
    return [
        (label, f"{summary[key]:.1f} GiB") for key, label in labels.items() if summary.get(key) is not None
    ]
