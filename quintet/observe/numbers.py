"""Numbers as people read them, the same in the terminal and in the report."""

from __future__ import annotations

import math

NOTHING = "–"


def short(value: float | None) -> str:
    """Return a number in about three digits: 0.412, 12.3k, 4.5e-5; "–" for nothing."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size == 0:
        return "0"
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * (10 if suffix == "k" else 0.9995):
            return f"{value / unit:.3g}{suffix}" if size / unit < 999.5 else f"{value / unit:.0f}{suffix}"
    if size >= 999.5:
        return f"{value:,.0f}"
    if size < 1e-3:
        return scientific(value)
    return f"{value:.3g}"


def scientific(value: float) -> str:
    """Return a number as 1.2e-7: no padding in the exponent."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def percent(share: float | None) -> str:
    """Return a share as percentage: 0.7183 as "71.8%"."""
    return NOTHING if share is None else f"{100 * share:.1f}%"


def points(before: float | None, after: float | None) -> str:
    """Return the difference of two shares in percentage points: "+30.6"."""
    return NOTHING if before is None or after is None else f"{100 * (after - before):+.1f}"


def change(before: float | None, after: float | None) -> str:
    """Return the difference of two numbers in about three digits: "+0.31"."""
    if before is None or after is None:
        return NOTHING
    return f"{'-' if after < before else '+'}{short(abs(after - before))}"


def duration(seconds: float) -> str:
    """Return seconds as text: 0.47 s, 12.3 s, 4 min 12 s, 2 h 05 min."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
