"""Which plots a report shows, from the ledger's lines. A plot without data is left out when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quintet.observe.memory import PHASES
from quintet.observe.report.svg import Plot, Series
from quintet.observe.signal import METRIC
from quintet.runs.ledger import OF_REWARDS

Lines = Sequence[Mapping[str, Any]]


def main_plots(lines: Lines) -> list[Plot]:
    """Return plots of the main stage: what was learned first, then how soundly, then how fast."""
    accuracy = {"sampled": "eval/accuracy", "greedy": "eval/greedy", "well-formed": "eval/well_formed"}
    rewards = {"sampled": "eval/reward", "greedy": "eval/greedy_reward"}
    again = all(line["eval/reward"] == line.get("eval/accuracy") for line in lines if "eval/reward" in line)
    gap = {"mean": "mismatch/logprob_gap_mean", "largest": "mismatch/logprob_gap_max"}
    kl = {"rollout ↔ trainer": "mismatch/kl_k3", "to the reference": "kl/reference"}
    clipped = {"below": "clip/low_fraction", "above": "clip/high_fraction"}
    length = {"mean": "response_tokens/mean", "longest": "response_tokens/max"}
    memory = {"host": "memory/host_gib", "device": "memory/device_gib"}
    peaks = [(w, {phase: f"memory/{phase}_{w}_gib" for phase in PHASES}) for w in ("host", "device")]
    return [
        _plot(lines, "Reward", {"mean": "reward/mean"}, note="mean of a step's samples", smooth=True),
        _plot(lines, "Held-out accuracy", accuracy, style="dots", as_percent=True),
        _plot(lines, "Held-out reward", {} if again else rewards, style="dots"),
        *_of_reward(lines),
        _plot(lines, "Groups without signal", {"share": METRIC}, as_percent=True, from_zero=True),
        _plot(lines, "Response length", length, note="tokens", from_zero=True),
        _plot(lines, "KL", kl, note="nats a token", log=True),
        _plot(lines, "|Δ log-prob|, rollout ↔ trainer", gap, note="nats", log=True),
        *update_plots(lines),
        _plot(lines, "Entropy", {"mean": "entropy"}, note="nats a token", smooth=True, from_zero=True),
        _plot(lines, "Clipped tokens", clipped, as_percent=True, from_zero=True),
        _plot(lines, "Throughput", {"tokens/s": "tokens_per_s"}, smooth=True, from_zero=True),
        Plot("Seconds by phase", _phases(lines), note="a step", stacked=True),
        _plot(lines, "Memory peak", memory, note="GiB", from_zero=True),
        *(_plot(lines, f"Memory peak by phase, {w}", keys, note="GiB", from_zero=True) for w, keys in peaks),
    ]


def update_plots(lines: Lines) -> list[Plot]:
    """Return plots of optimizer steps, of RL or of the supervised warm-up."""
    return [
        _plot(lines, "Loss", {"loss": "loss"}, smooth=True),
        _plot(lines, "Learning rate", {"lr": "lr"}, from_zero=True),
        _plot(lines, "Gradient norm", {"before clipping": "grad_norm"}, from_zero=True),
    ]


def _of_reward(lines: Lines) -> list[Plot]:
    """Further numbers that the reward returned, in training and held out."""
    names = dict.fromkeys(
        key for line in lines for key in line if key.startswith(("reward/", "eval/reward/"))
    )
    told = dict.fromkeys(
        name for key in names if (name := key.removeprefix("eval/").removeprefix("reward/")) not in OF_REWARDS
    )
    return [
        Plot(
            name,
            [
                _series(lines, "training", f"reward/{name}", "line", True),
                _series(lines, "held out", f"eval/reward/{name}", "dots", False),
            ],
            note="mean, told by the reward",
        )
        for name in told
    ]


def _plot(
    lines: Lines,
    title: str,
    metrics: Mapping[str, str],
    *,
    smooth: bool = False,
    style: Literal["line", "dots"] = "line",
    **options: Any,
) -> Plot:
    """metrics: of each line its name and the metric that it shows."""
    series = [_series(lines, name, key, style, smooth) for name, key in metrics.items()]
    return Plot(title, series, **options)


def _series(lines: Lines, name: str, key: str, style: Literal["line", "dots"], smooth: bool) -> Series:
    chosen = [line for line in lines if key in line]
    return Series(name, [line["step"] for line in chosen], [line[key] for line in chosen], style, smooth)


REST = "everything else"
_REST_COLOR, _COLORS = 5, 8


def phase_colors(lines: Lines) -> dict[str, int]:
    """Return a colour for each phase, the same wherever it is shown: step phases first, then the others."""
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
