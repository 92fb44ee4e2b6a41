"""The report's page: from the plain contents of a run directory to one HTML text without outside resources."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.observe.numbers import NOTHING, duration, percent, short
from quintet.observe.report.figures import REST, main_plots, phase_colors, update_plots
from quintet.observe.report.samples import samples_section
from quintet.observe.report.svg import Plot, render
from quintet.observe.summary import RUNNING, Row, main_stage, peaks, rows, summarize


@dataclass(frozen=True)
class Run:
    """What a run directory holds, as far as it got."""

    name: str
    lines: Sequence[dict[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    recipe: Sequence[tuple[str, bool]] = ()
    """Lines of the resolved recipe, and whether each differs from the default."""


def page(run: Run) -> str:
    """Return the whole report as HTML."""
    stage = main_stage(list(run.lines))
    main = [line for line in run.lines if line.get("stage") == stage]
    warm_up = [line for line in run.lines if line.get("stage") == "sft" and stage != "sft"]
    # A run that was cut off has none: what its ledger tells of it, but for the clock.
    summary = run.summary or (summarize(list(run.lines), 0.0, {}) if run.lines else {})
    sections = [
        _head(run),
        _tiles(summary, main),
        _figures("Training", main_plots(main)),
        _figures("Supervised warm-up", update_plots(warm_up)),
        _result(summary, phase_colors([*main, *warm_up])),
        (samples := samples_section(run.samples)),
        _recipe(run.recipe),
        _environment(run.environment),
    ]
    scripts = _beside("hover.js") + (_beside("samples.js") if samples else "")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(run.name)}: quintet report</title><style>{_beside('style.css')}</style></head>\n"
        f'<body><main>{"".join(sections)}</main><div id="hover"></div><script>{scripts}</script></body></html>\n'
    )


def _head(run: Run) -> str:
    status = str(run.summary.get("status", "unfinished"))
    parts = [str(run.environment[key]) for key in ("started", "command") if run.environment.get(key)]
    if status == RUNNING:
        parts.append(f"as of {run.summary.get('written')}; load it again for later steps")
    if starts := run.summary.get("starts"):
        parts.append(f"start {len(starts)} of a run that began {starts[0]}")
    error = run.summary.get("error")
    phase = f" (phase {run.summary['phase']})" if run.summary.get("phase") else ""
    return (
        f'<header><h1>{_text(run.name)}</h1><span class="badge {_text(status)}">{_text(status)}</span></header>'
        f'<p class="lead">{" · ".join(map(_text, parts))}</p>'
        + (f'<div class="error">{_text(str(error) + phase)}</div>' if error and status == "failed" else "")
    )


def _tiles(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    tiles = []
    for row in rows(summary)[:2]:
        after = row.after != NOTHING
        more = f"from {row.before} {_change(row)}" if after else "before training"
        tiles.append(_tile(_capital(row.label), row.after if after else row.before, more))
    steps = [line for line in lines if "seconds/step" in line]
    if steps:
        last = steps[-1]
        if last.get("reward/mean") is not None:
            tiles.append(
                _tile("Reward", short(last["reward/mean"]), f"{short(steps[0].get('reward/mean'))} at first")
            )
        tokens = sum(line.get("tokens") or 0 for line in steps)
        seconds = sum(line.get("seconds/step") or 0 for line in steps)
        tiles.append(_tile("Steps", f"{len(steps):,}", f"{duration(seconds / len(steps))} a step"))
        if tokens:
            rate = f"{short(tokens / seconds)} a second with prompts" if seconds else ""
            trained = sum(line.get("tokens_trained") or 0 for line in steps)
            tiles.append(_tile("Tokens trained on", short(trained), rate))
    if summary.get("seconds_total"):
        tiles.append(_tile("Wall time", duration(summary["seconds_total"]), "with start-up and evaluations"))
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _tile(name: str, value: str, more: str = "") -> str:
    return (
        f'<div class="tile"><div class="name">{_text(name)}</div><div class="value">{_text(value)}</div>'
        f'<div class="more">{more}</div></div>'
    )


def _change(row: Row) -> str:
    return f'<span class="{row.style}">{row.change}</span>' if row.style else row.change


def _capital(label: str) -> str:
    return label[0].upper() + label[1:]


def _figures(title: str, plots: Sequence[Plot]) -> str:
    figures = "".join(map(render, plots))
    return f'<h2>{title}</h2><section class="plots">{figures}</section>' if figures else ""


def _result(summary: Mapping[str, Any], colors: Mapping[str, int]) -> str:
    if not summary:
        return ""
    evaluated = "".join(
        f"<tr><td>{_text(_capital(row.label))}</td><td>{row.before}</td><td>{row.after}</td><td>{_change(row)}</td></tr>"
        for row in rows(summary)
    )
    head = '<tr><th></th><th class="n">before</th><th class="n">after</th><th class="n">change</th></tr>'
    card = f'<div class="card"><table>{head}{evaluated}</table></div>' if evaluated else ""
    why = f'<p class="lead">{_text(summary["nothing_learnt"])}</p>' if summary.get("nothing_learnt") else ""
    return f'<h2>Result</h2>{why}<section class="pair">{card}{_time(summary, colors)}</section>'


def _time(summary: Mapping[str, Any], colors: Mapping[str, int]) -> str:
    phases = dict(summary.get("seconds_by_phase") or {})
    total = float(summary.get("seconds_total") or 0)
    rest = total - sum(phases.values())
    if rest > 0.01 * total > 0:
        phases[REST] = rest
    bar = "".join(
        f'<i class="c{colors.get(phase, 7)}" style="width:{100 * seconds / total if total else 0:.3f}%"></i>'
        for phase, seconds in phases.items()
    )
    lines = "".join(
        f'<tr><td><span class="key"><i class="c{colors.get(phase, 7)}"></i></span>{_text(phase)}</td><td>{duration(seconds)}</td>'
        f"<td>{percent(seconds / total) if total else ''}</td></tr>"
        for phase, seconds in phases.items()
    )
    facts = [("wall time", duration(total))] * bool(total) + peaks(summary)
    lines += "".join(f"<tr><th>{label}</th><td>{value}</td><td></td></tr>" for label, value in facts)
    return f'<div class="card"><div class="bar">{bar}</div><table>{lines}</table></div>'


def _recipe(lines: Sequence[tuple[str, bool]]) -> str:
    if not lines:
        return ""
    body = "\n".join(
        f'<span class="set">{_text(line)}</span>' if given else _text(line) for line, given in lines
    )
    return (
        '<h2>Recipe</h2><details class="card" open><summary>Resolved recipe '
        f'<span class="note">highlighted: not the default</span></summary><pre class="recipe">{body}</pre></details>'
    )


def _environment(environment: Mapping[str, Any]) -> str:
    if not environment:
        return ""
    facts = {
        "python": environment.get("python"),
        "platform": environment.get("platform"),
        "CPU cores": environment.get("cpu_count"),
    }
    versions = dict(environment.get("versions") or {})
    tables = [
        "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in part.items())
        for part in (versions, {key: value for key, value in facts.items() if value})
        if part
    ]
    cards = "".join(f'<div class="card"><table>{table}</table></div>' for table in tables)
    return f'<h2>Versions and machine</h2><section class="pair">{cards}</section>'


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _text(value: object) -> str:
    return html.escape(str(value))
