"""Plots as inline SVG, drawn by hand: lines over steps, and stacked bars. Colours come from the page's CSS.

Coordinates are those of a fixed view box; the page scales it. A value that is missing or not finite leaves a
gap in its line and never moves an axis.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

from quintet.observe.numbers import percent, scientific, short

WIDTH, HEIGHT = 460.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 12.0, 10.0, 26.0
MOST_POINTS = 400
"""More points than this are thinned: nobody sees them, and files stay small."""

Value = float | int | None


@dataclass(frozen=True)
class Series:
    """One line of a plot. `y` may have gaps. `smooth` draws the raw line faint under its running mean."""

    name: str
    x: Sequence[float]
    y: Sequence[Value]
    style: Literal["line", "dots"] = "line"
    smooth: bool = False
    color: int | None = None
    """Which of the page's colours; None takes them in turn."""


@dataclass(frozen=True)
class Plot:
    """A figure: lines, or stacked bars when `stacked`. `log` is used where the data spans decades."""

    title: str
    series: Sequence[Series]
    note: str = ""
    as_percent: bool = False
    from_zero: bool = False
    log: bool = False
    stacked: bool = False


def render(plot: Plot) -> str:
    """Return a <figure> with title, latest values as legend, and the SVG; "" when there is nothing to draw."""
    drawn = [one for one in plot.series if _finite_of(one.y)]
    series = [
        replace(one, color=index if one.color is None else one.color) for index, one in enumerate(drawn)
    ]
    if not series:
        return ""
    show = percent if plot.as_percent else short
    legend = "".join(
        f'<span class="key"><i class="c{one.color}"></i>{html.escape(one.name)} <b>{show(_last(one.y))}</b></span>'
        for one in series
    )
    body = _stacked(series) if plot.stacked else _lines(plot, series, show)
    note = f'<span class="note">{html.escape(plot.note)}</span>' if plot.note else ""
    hover = html.escape(json.dumps(_hover(series, show), separators=(",", ":"), ensure_ascii=False))
    return (
        f'<figure class="plot"><figcaption><h3>{html.escape(plot.title)}</h3>{note}'
        f'<div class="legend">{legend}</div></figcaption>'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{html.escape(plot.title)}"'
        f' data-hover="{hover}">{body}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg></figure>'
    )


# --- scales


@dataclass(frozen=True)
class _Scale:
    """Maps data to the view box along one direction."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def _x_scale(series: Sequence[Series], margin: float = 0.0) -> _Scale:
    xs = [value for one in series for value in one.x]
    return _Scale(min(xs) - margin, max(xs) + margin, LEFT, WIDTH - RIGHT)


def _y_scale(plot: Plot, series: Sequence[Series]) -> _Scale:
    values = [value for one in series for value in _finite_of(one.y)]
    low, high = min(values), max(values)
    positive = [value for value in values if value > 1e-200]
    if plot.log and positive and min(positive) * 30 < high:
        low, high = (
            10.0 ** way(math.log10(end)) for way, end in ((math.floor, min(positive)), (math.ceil, high))
        )
        return _Scale(low, high, HEIGHT - BOTTOM, TOP, log=True)
    if plot.from_zero:
        low = min(low, 0.0)
    size = max(abs(low), abs(high))
    if high - low < 1e-9 * size or size < 1e-200:
        spread = 0.1 * size if size > 1e-200 else 1.0
        low, high = (low, high + spread) if plot.from_zero else (low - spread, high + spread)
    step = _nice((high - low) / 4)
    return _Scale(
        math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, HEIGHT - BOTTOM, TOP
    )


def _nice(step: float) -> float:
    """The next larger of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def _ticks(scale: _Scale, most: int, *, whole: bool = False) -> list[float]:
    if scale.log:
        decades = range(round(math.log10(scale.low)), round(math.log10(scale.high)) + 1)
        return [10.0**decade for decade in decades][:: max(1, math.ceil(len(decades) / most))]
    if scale.high <= scale.low:
        return [scale.low]
    step = _nice((scale.high - scale.low) / most)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(scale.low / step - 1e-9)
    count = math.floor(scale.high / step + 1e-9) - first + 1
    return [(first + i) * step for i in range(count)]


def _axes(x: _Scale, y: _Scale, series: Sequence[Series], show: Callable[[float | None], str]) -> str:
    parts = []
    ticks = _ticks(y, 4)
    tiny = not y.log and max(map(abs, ticks)) < 5e-3
    for value in ticks:
        at = y(value)
        text = f"{100 * value:.3g}%" if show is percent else _tick_text(value, tiny)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{text}</text>')
    parts += [
        f'<text class="tick" x="{x(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{value:.0f}</text>'
        for value in _ticks(_x_scale(series), 6, whole=True)  # Without the margin: no ticks beside the data.
    ]
    return "".join(parts)


def _tick_text(value: float, tiny: bool) -> str:
    """Ticks of one axis are written alike: all as powers of ten where the largest is tiny."""
    if abs(value) < 1e-15:
        return "0"
    return scientific(value).replace(".0e", "e") if tiny else short(value).replace(".0e", "e")


# --- lines


def _lines(plot: Plot, series: Sequence[Series], show: Callable[[float | None], str]) -> str:
    single = len({value for one in series for value in one.x}) == 1
    x, y = _x_scale(series, 1.0 if single else 0.0), _y_scale(plot, series)
    parts = [_axes(x, y, series, show)]
    for one in series:
        smooth = one.smooth and len(one.x) >= 20
        points = _thin(list(zip(one.x, one.y, strict=True)))
        parts.append(f'<path class="line c{one.color}{" raw" if smooth else ""}" d="{_path(points, x, y)}"/>')
        if smooth:
            every = max(1, len(one.x) // MOST_POINTS)
            mean = running_mean(one.y, max(3, len(one.y) // 15), every)
            parts.append(
                f'<path class="line c{one.color}" d="{_path(zip(one.x[::every], mean, strict=True), x, y)}"/>'
            )
        if one.style == "dots" or len(points) == 1:
            parts += [
                f'<circle class="dot c{one.color}" cx="{x(at):.1f}" cy="{y(float(value)):.1f}" r="3.5"/>'
                for at, value in points
                if _finite(value)
            ]
    return "".join(parts)


def _path(points: Iterable[tuple[float, Value]], x: _Scale, y: _Scale) -> str:
    """Move to the start of each unbroken piece, then lines."""
    commands, pen_down = [], False
    for at, value in points:
        if not _finite(value):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{x(at):.1f} {y(float(value)):.1f}")
        pen_down = True
    return "".join(commands)


def running_mean(values: Sequence[Value], width: int, every: int = 1) -> list[Value]:
    """Return the mean of the finite values within `width // 2` places on either side, of every so many places; None where there is
    none.

    Centred, so that it does not lag behind what it smooths.
    """
    half, result = width // 2, []
    for index in range(0, len(values), every):
        near = _finite_of(values[max(0, index - half) : index + half + 1])
        result.append(sum(near) / len(near) if near else None)
    return result


def _thin(points: list[tuple[float, Value]]) -> list[tuple[float, Value]]:
    """At most MOST_POINTS points; of each group of neighbours the least and the greatest stay, so spikes do."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[tuple[float, Value]] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        finite = [(value, at) for at, value in group if _finite(value)]
        if not finite:
            kept.append(group[0])
            continue
        kept += [(at, value) for value, at in sorted({min(finite), max(finite)}, key=lambda pair: pair[1])]
    return kept


# --- stacked bars


def _stacked(series: Sequence[Series]) -> str:
    """One bar a step, or the mean of neighbouring steps where there are too many to see."""
    most = 90
    xs = series[0].x
    size = math.ceil(len(xs) / most)
    starts = range(0, len(xs), size)
    bars = [[_mean(one.y[start : start + size]) for one in series] for start in starts]
    centres = [(xs[start] + xs[min(start + size, len(xs)) - 1]) / 2 for start in starts]
    gap = (centres[1] - centres[0]) if len(centres) > 1 else 1.0
    x = _x_scale(series, gap / 2)
    highest = max(1e-9, *map(sum, bars))
    step = _nice(highest / 4)
    y = _Scale(0.0, math.ceil(highest / step - 1e-9) * step, HEIGHT - BOTTOM, TOP)
    width = (x(gap) - x(0)) * (0.82 if len(bars) < 60 else 1.0)
    parts = [_axes(x, y, series, short)]
    for centre, bar in zip(centres, bars, strict=True):
        below = 0.0
        for one, value in zip(series, bar, strict=True):
            top, bottom = y(below + value), y(below)
            parts.append(
                f'<rect class="c{one.color}" x="{x(centre) - width / 2:.1f}" y="{top:.1f}" '
                f'width="{width:.1f}" height="{bottom - top:.1f}"/>'
            )
            below += value
    return "".join(parts)


def _mean(values: Sequence[Value]) -> float:
    finite = _finite_of(values)
    return sum(finite) / len(finite) if finite else 0.0


# --- hover


def _hover(series: Sequence[Series], show: Callable[[float | None], str]) -> list[list[object]]:
    """For the page's script: [step, x in the view box as a share, text] at up to MOST_POINTS steps."""
    steps = sorted(
        {at for one in series for at, value in zip(one.x, one.y, strict=True) if value is not None}
    )
    by_step: dict[float, list[str]] = {at: [] for at in steps[:: max(1, math.ceil(len(steps) / MOST_POINTS))]}
    for one in series:
        for at, value in zip(one.x, one.y, strict=True):
            if value is not None and at in by_step:
                by_step[at].append(f"{one.name} {show(float(value))}")
    x = _x_scale(series)
    return [[f"step {at:.0f}", round(x(at) / WIDTH, 4), "\n".join(said)] for at, said in by_step.items()]


def _finite(value: Value) -> TypeGuard[float]:
    """Whether a value can be drawn; beyond 1e300 the arithmetic of an axis would overflow."""
    return value is not None and abs(value) < 1e300


def _finite_of(values: Iterable[Value]) -> list[float]:
    return [float(value) for value in values if _finite(value)]


def _last(values: Sequence[Value]) -> float | None:
    return next((float(value) for value in reversed(values) if value is not None), None)
