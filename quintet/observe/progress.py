"""Progress of long phases: bars on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.progress import Task as BarTask
from rich.text import Text

from quintet.observe.numbers import duration

PLAIN_EVERY_S = 10.0


class _Elapsed(TimeElapsedColumn):
    def render(self, task: BarTask) -> Text:
        return super().render(task).append(" elapsed")


class _Left(TimeRemainingColumn):
    """Nothing where it cannot be told yet."""

    def render(self, task: BarTask) -> Text:
        text = super().render(task)
        return Text() if "-" in text.plain or not text.plain else text.append(" left")


class Task:
    """One phase under way. `advance` when a part of it is done; `note` says a word beside the bar."""

    def __init__(self, progress: Progress, name: str, total: int | None, unit: str) -> None:
        self.name, self.total, self.unit, self.done = name, total, unit, 0
        self._progress = progress
        self._note = ""
        self._started = self._last_line = time.monotonic()
        self._bar: TaskID | None = None
        if progress.bars is not None:
            self._bar = progress.bars.add_task(name, total=total, note="", unit=unit)

    def advance(self, count: int = 1) -> None:
        """Count `count` more units as done."""
        self.done += count
        if self._progress.bars is not None and self._bar is not None:
            self._progress.bars.advance(self._bar, count)
        elif time.monotonic() - self._last_line >= PLAIN_EVERY_S:
            self._last_line = time.monotonic()
            self._line()

    def note(self, text: str) -> None:
        """Show a short text beside the bar, such as the loss."""
        self._note = text
        if self._progress.bars is not None and self._bar is not None:
            self._progress.bars.update(self._bar, note=text)

    def finish(self, failed: bool) -> None:
        """Take the bar away, and leave one line that says what it came to."""
        if self._progress.bars is not None and self._bar is not None:
            self._progress.bars.remove_task(self._bar)
        if not failed:
            self._line(ended=True)

    def _line(self, ended: bool = False) -> None:
        elapsed = time.monotonic() - self._started
        count = f"{self.done}/{self.total}" if self.total and not ended else f"{self.done}"
        amount = f"{count} {self.unit}" if self.done else ""
        rate = f"{self.done / elapsed:.1f} {self.unit}/s" if self.done and elapsed > 1 else ""
        parts = [amount, f"in {duration(elapsed)}" if ended else duration(elapsed), rate, self._note]
        self._progress.console.print(f"{self.name}: {', '.join(filter(None, parts))}", soft_wrap=True)


class Progress:
    """Bars that share the console with the step lines: lines scroll above, bars stay below.

    On anything but a terminal each task prints a line every ten seconds and one at its end.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars: Bars | None = None
        self._open = 0

    @contextmanager
    def task(
        self, name: str, total: int | None = None, unit: str = "", *, quiet: bool = False
    ) -> Iterator[Task]:
        """Show progress of what runs inside. `total` None means it is not known how much there is.

        `quiet` leaves no line behind, for phases that come back every step.
        """
        self._open += 1
        if self.bars is None and self.console.is_terminal:
            self._start()
        task = Task(self, name, total, unit)
        ended = False
        try:
            yield task
            ended = True
        finally:
            task.finish(failed=quiet or not ended)
            self._open = max(0, self._open - 1)
            if self._open == 0:
                self.close()

    def close(self) -> None:
        """Take all bars away."""
        self._open = 0
        if self.bars is not None:
            self.bars.stop()
            self.bars = None

    def _start(self) -> None:
        columns = (
            SpinnerColumn(),
            "[bold]{task.description}",
            BarColumn(),
            MofNCompleteColumn(),
            "{task.fields[unit]}",
            _Elapsed(),
            _Left(),
            "[dim]{task.fields[note]}",
        )
        self.bars = Bars(*columns, console=self.console, transient=True)
        self.bars.start()
