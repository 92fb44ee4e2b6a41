"""The line a step: aligned columns under a header that comes back every screenful."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from quintet.observe.numbers import percent, scientific, short
from quintet.observe.signal import METRIC

LINES_PER_HEADER = 20


@dataclass(frozen=True)
class Column:
    """One column: header, the metric it shows, how, and how soon it goes when the terminal is narrow."""

    header: str
    key: str
    width: int
    show: Callable[[Any], str]
    keep: int = 1
    """Columns of the lowest number go first."""


def _fixed(digits: int) -> Callable[[Any], str]:
    return lambda value: f"{value:.{digits}f}"


_LEFT = [
    Column("reward", "reward/mean", 7, _fixed(3), 9),
    Column("no signal", METRIC, 9, percent, 7),
    Column("loss", "loss", 8, _fixed(4), 2),
    Column("length", "response_tokens/mean", 7, _fixed(1), 8),
    Column("KL r↔t", "mismatch/kl_k3", 8, scientific, 7),
    Column("grad", "grad_norm", 7, short, 6),
    Column("values expl.", "critic/explained_variance", 12, _fixed(3), 6),
    Column("lr", "lr", 8, scientific, 3),
    Column("tok/s", "tokens_per_s", 7, short, 5),
    Column("s/step", "seconds/step", 7, _fixed(2), 9),
]
_RIGHT = [
    Column("host GiB", "memory/host_gib", 8, short, 4),
    Column("dev GiB", "memory/device_gib", 7, short, 4),
]


class StepPrinter:
    """Prints a step's metrics in columns. Which columns there are is decided at the first line of a stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage: str | None = None
        self._columns: list[Column] = []
        self._lines = 0
        self._last_reward: float | None = None

    def step(self, stage: str, step: int, total: int | None, metrics: Mapping[str, Any]) -> None:
        """Print one line, and the header where it is due."""
        if stage != self._stage:
            self._stage, self._lines, self._last_reward = stage, 0, None
        label = f"{step}/{total}" if total else str(step)
        if self._lines % LINES_PER_HEADER == 0:
            self._columns = self._choose(metrics, len(f"{total}/{total}"))
            header = "".join(f"{column.header:>{column.width + 2}}" for column in self._columns)
            self._print(Text(f"{stage:>{self._label_width(total)}}{header}", style="bold dim"))
        self._lines += 1
        line = Text(f"{label:>{self._label_width(total)}}")
        for column in self._columns:
            value = metrics.get(column.key)
            text = "–" if value is None else column.show(value)
            line.append(f"{text:>{column.width + 2}}", style=self._style(column, value))
        self._print(line)
        self._last_reward = metrics.get("reward/mean", self._last_reward)

    def _choose(self, metrics: Mapping[str, Any], label: int) -> list[Column]:
        timing = [
            Column(name, key, max(len(name), 5), _fixed(2), 1)
            for key in metrics
            if (name := key.removeprefix("seconds/")) not in (key, "step")
        ]
        columns = [one for one in [*_LEFT, *timing, *_RIGHT] if metrics.get(one.key) is not None]
        # A file or a pipe has no width; a terminal shows what fits, because a wrapped table is no table.
        room = self._console.width - max(label, 6) if self._console.is_terminal else 10_000
        while columns and sum(column.width + 2 for column in columns) > room:
            least = min(column.keep for column in columns)
            columns.remove([column for column in columns if column.keep == least][-1])
        return columns

    @staticmethod
    def _label_width(total: int | None) -> int:
        return max(6, len(f"{total}/{total}")) if total else 6

    def _style(self, column: Column, value: Any) -> str:
        if value is None or column.key.startswith(("seconds/", "memory/", "lr")):
            return "dim"
        if column.key == "reward/mean":
            return "green" if self._last_reward is None or value >= self._last_reward else "yellow"
        if column.key == METRIC:
            return "yellow" if value == 1 else "dim"
        if column.key == "mismatch/kl_k3":
            # Rollout and trainer have the same weights: beyond rounding, something is wrong or stale.
            return "red" if not abs(value) <= 0.1 else "yellow" if abs(value) > 0.01 else ""
        return ""

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
