"""Which plots a report shows, from the ledger's lines. A plot without data is left out when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quintet.observe.memory import PHASES
from quintet.observe.report.svg import Plot, Series

Lines = Sequence[Mapping[str, Any]]


def main_plots(lines: Lines) -> list[Plot]:
    """Plots of the main stage: what was learned first, then how soundly, then how fast."""
    return [
        Plot("Reward", [_series(lines, "mean", "reward/mean", smooth=True)], note="mean of a step's samples"),
        Plot(
            "Held-out accuracy",
            [
                _series(lines, "sampled", "eval/accuracy", style="dots"),
                _series(lines, "greedy", "eval/greedy", style="dots"),
                _series(lines, "well-formed", "eval/well_formed", style="dots"),
            ],
            as_percent=True,
        ),
        Plot(
            "Response length",
            [
                _series(lines, "mean", "response_tokens/mean"),
                _series(lines, "longest", "response_tokens/max"),
            ],
            note="tokens",
            from_zero=True,
        ),
        Plot(
            "KL",
            [
                _series(lines, "rollout ↔ trainer", "mismatch/kl_k3"),
                _series(lines, "to the reference", "kl/reference"),
            ],
            note="nats a token",
            log=True,
        ),
        Plot(
            "|Δ log-prob|, rollout ↔ trainer",
            [
                _series(lines, "mean", "mismatch/logprob_gap_mean"),
                _series(lines, "largest", "mismatch/logprob_gap_max"),
            ],
            note="nats",
            log=True,
        ),
        Plot("Gradient norm", [_series(lines, "before clipping", "grad_norm")], from_zero=True),
        Plot("Learning rate", [_series(lines, "lr", "lr")], from_zero=True),
        Plot("Loss", [_series(lines, "loss", "loss", smooth=True)]),
        Plot(
            "Entropy", [_series(lines, "mean", "entropy", smooth=True)], note="nats a token", from_zero=True
        ),
        Plot(
            "Clipped tokens",
            [
                _series(lines, "below", "clip/low_fraction"),
                _series(lines, "above", "clip/high_fraction"),
            ],
            as_percent=True,
            from_zero=True,
        ),
        *_speed_plots(lines),
    ]


def warm_up_plots(lines: Lines) -> list[Plot]:
    """Plots of the supervised warm-up."""
    return [
        Plot("Loss", [_series(lines, "loss", "loss", smooth=True)]),
        Plot("Learning rate", [_series(lines, "lr", "lr")], from_zero=True),
        Plot("Gradient norm", [_series(lines, "before clipping", "grad_norm")], from_zero=True),
    ]


def _speed_plots(lines: Lines) -> list[Plot]:
    return [
        Plot("Throughput", [_series(lines, "tokens/s", "tokens_per_s", smooth=True)], from_zero=True),
        Plot("Seconds by phase", _phases(lines), note="a step", stacked=True),
        Plot(
            "Memory peak",
            [_series(lines, "host", "memory/host_gib"), _series(lines, "device", "memory/device_gib")],
            note="GiB",
            from_zero=True,
        ),
        *(
            Plot(
                f"Memory peak by phase, {where}",
                [_series(lines, phase, f"memory/{phase}_{where}_gib") for phase in PHASES],
                note="GiB",
                from_zero=True,
            )
            for where in ("host", "device")
        ),
    ]


def _series(lines: Lines, name: str, key: str, **options: Any) -> Series:
    chosen = [line for line in lines if key in line]
    return Series(name, [line["step"] for line in chosen], [line[key] for line in chosen], **options)


REST = "everything else"
_REST_COLOR, _COLORS = 5, 8


def phase_colors(lines: Lines) -> dict[str, int]:
    """A colour for each phase, the same wherever it is shown: step phases first, then the others."""
    ordered = sorted(lines, key=lambda line: "seconds/step" not in line)
    keys = dict.fromkeys(key for line in ordered for key in line if key.startswith("seconds/"))
    names = [key.removeprefix("seconds/") for key in keys if key != "seconds/step"]
    colors = [color for color in range(_COLORS) if color != _REST_COLOR]
    return {name: colors[index % len(colors)] for index, name in enumerate(names)} | {REST: _REST_COLOR}


def _phases(lines: Lines) -> list[Series]:
    """One series a phase over the training steps, and one for the time in no phase, where it is worth seeing."""
    steps = [line for line in lines if "seconds/step" in line]
    x = [line["step"] for line in steps]
    colors = phase_colors(steps)
    series = [
        Series(name, x, [line.get(f"seconds/{name}") or 0.0 for line in steps], color=color)
        for name, color in colors.items()
        if name != REST
    ]
    rest = [
        max(0.0, (line["seconds/step"] or 0.0) - sum(float(one.y[index] or 0.0) for one in series))
        for index, line in enumerate(steps)
    ]
    if sum(rest) > 0.01 * sum(line["seconds/step"] or 0.0 for line in steps):
        series.append(Series(REST, x, rest, color=colors[REST]))
    return series
