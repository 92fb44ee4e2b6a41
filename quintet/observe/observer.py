"""One object the loops talk to: it times phases, keeps the ledger, shows progress, and closes the run well.

However a run ends (done, failed, Ctrl-C), leaving the `with` block leaves a readable run directory: a summary
with its status and a report of the steps there were.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.markup import escape

from quintet.errors import Stopped
from quintet.observe.acceptance import AcceptanceFalls
from quintet.observe.losses import Losses
from quintet.observe.phases import PhaseTimer
from quintet.observe.progress import Progress
from quintet.observe.report import write_report
from quintet.observe.signal import IdleSteps
from quintet.observe.step_line import StepPrinter
from quintet.observe.summary import RUNNING, closing_table, summarize
from quintet.observe.trackers import make_trackers
from quintet.recipe.schema import Recipe
from quintet.runs.directory import RunDirectory
from quintet.runs.fsync import Scratch, lossy
from quintet.runs.ledger import Ledger, read_metrics
from quintet.runs.left_behind import where_to_look

REPORT_EVERY_S = 1.0
"""Between two reports of a run that goes on, at least."""


class Observer:
    """What is recorded and shown of a run: a context manager around the whole of it.

    `directory` is the run directory, `progress` shows long phases, `extra` is added to summary.json.

    With `keep` false, for commands whose output is their result, nothing is left behind and nothing goes to
    standard output: the directory is a temporary one, there are no trackers, and progress goes to standard error.

    resume: the directory of a run that goes on. It is left as it is until `go_on` says after which step.
    """

    def __init__(
        self,
        recipe: Recipe,
        console: Console | None = None,
        *,
        keep: bool = True,
        resume: Path | None = None,
    ) -> None:
        self.recipe, self.keep = recipe, keep
        goes_on = recipe.checkpoint.on_error == "continue"
        self.console = console or Console(
            highlight=False, stderr=not keep, file=_log(goes_on) if keep else None
        )
        self._losses = Losses(goes_on, self.note)
        self._scratch = ExitStack()
        self.directory = self._directory(resume)
        self.progress = Progress(self.console)
        self.phases = PhaseTimer()
        self.extra: dict[str, Any] = {}
        self._ledger = Ledger(self.directory.metrics)
        self._printer = StepPrinter(self.console)
        self._watches = (IdleSteps(), AcceptanceFalls())
        self._untouched, self._report_due = resume is not None, 0.0
        self._trackers = make_trackers(recipe, self.directory.path, self.note) if keep else []
        if keep:
            self.console.print(f"run directory {self.directory.path}", soft_wrap=True)
        if self.directory.lock is not None and self.directory.lock.left_behind is not None:
            self.note(f"it was left behind by {self.directory.lock.left_behind}, which is gone")

    def _directory(self, resume: Path | None) -> RunDirectory:
        if resume is not None:
            return RunDirectory.reopen(resume)
        if self.keep:
            return RunDirectory.create(self.recipe)
        return RunDirectory(Path(self._scratch.enter_context(Scratch())))

    def go_on(
        self,
        stage: str,
        step: int,
        seconds: float,
        seconds_by_phase: Mapping[str, float],
        later: Iterable[Path] = (),
    ) -> Path:
        """Go on with a run after `step` of `stage`, which took so many seconds to get there.

        What was recorded of later steps, and what else was made `later`, is set aside; returns the directory where it is.
        """
        self._ledger.close()
        aside = self.directory.cut_back(self.recipe, stage, step, later)
        self._ledger = Ledger(self.directory.metrics)
        self.phases.add(seconds, seconds_by_phase)
        lines = read_metrics(self.directory.metrics)
        for tracker in self._trackers:
            tracker.go_on(lines)
        self._untouched = False
        return aside

    def begin_steps(self) -> None:
        """Begin a loop: what has passed since the last step or evaluation, such as the start of the ranks, is no step's."""
        self.phases.lap()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the seconds inside to a phase: `with observer.phase("generate"): …`."""
        return self.phases(name)

    def step(
        self,
        step: int,
        metrics: Mapping[str, Any],
        *,
        stage: str = "rl",
        total: int | None = None,
        show: bool = True,
    ) -> None:
        """Record one training step and print its line (unless not `show`, as in a warm-up under a progress bar).

        Adds seconds/<phase>, seconds/step and tokens_per_s (from `tokens`).
        """
        by_phase, seconds = self.phases.lap()
        line = dict(metrics)
        line |= {f"seconds/{phase}": value for phase, value in by_phase.items()}
        line["seconds/step"] = seconds
        if "tokens" in line:
            line["tokens_per_s"] = line["tokens"] / seconds if seconds > 0 else None
        self._record(stage, step, line)
        if show:
            self._printer.step(stage, step, total, line)
        for watch in self._watches:
            if (warning := watch(line)) is not None:
                self.note(warning)
        self._report_so_far()

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record and print an evaluation after `step` steps: reward, accuracy where there is one, and what else.

        The names get the prefix `eval/`, but for `memory/…`. The first and the last evaluation become the
        summary's before and after.
        """
        by_phase, _ = self.phases.lap()
        line = {
            key if key.startswith(("eval/", "memory/")) else f"eval/{key}": value
            for key, value in metrics.items()
        }
        self._record("rl", step, line | {f"seconds/{phase}": value for phase, value in by_phase.items()})
        self._report_so_far()
        if not self.keep:  # The command prints the numbers itself.
            return
        shown = "  ".join(
            f"{key.removeprefix('eval/').replace('_', ' ')} {value:.3f}"
            for key, value in line.items()
            if isinstance(value, float) and key.startswith("eval/")
        )
        self.console.print(f"[bold cyan]evaluation after step {step}[/]  {escape(shown)}", soft_wrap=True)

    def samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Write samples to samples.jsonl: prompt, response, answer, reward, and what else there is."""
        with self._losses.of(self.directory.samples.name):
            self.directory.write_samples(step, samples)

    def replay(self, step: int, data: bytes) -> None:
        """Write samples of a step with their tokens and log-probs: the content of a file below replay/."""
        with self._losses.of("samples for replay"):
            self.directory.write_replay(step, data)

    def note(self, text: str) -> None:
        """Print a line among the step lines."""
        self.console.print(text, soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.close()
        self._ledger.close()
        if not self.keep or self._untouched:
            for tracker in self._trackers:
                tracker.close()
            self._release()
            return
        summary: dict[str, Any] = {"status": "finished", "run": self.directory.path.name}
        if kind is not None:
            summary["status"] = "interrupted" if issubclass(kind, KeyboardInterrupt | Stopped) else "failed"
            told = next(iter(str(error).strip().splitlines()), kind.__name__)
            summary |= {"error": told, "phase": self.phases.failed_in}
        try:
            self._close(summary)
        except Exception as late:
            if kind is None:
                raise
            # What ended the run matters more.
            self.note(f"could not write the summary or the report: {late}")
        finally:
            for text in where_to_look(self.directory, None if kind is None else self.recipe):
                self.note(text)
            self._release()

    def _release(self) -> None:
        self._scratch.close()
        if self.directory.lock is not None:
            self.directory.lock.release()

    def _sum_up(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Return what the run came to by now, added to what is known of its end."""
        lines = read_metrics(self.directory.metrics)
        summary |= summarize(lines, self.phases.elapsed(), self.phases.totals) | self.extra
        if self._losses.total:
            summary["records_left_out"] = self._losses.total
        if len(starts := self.directory.starts()) > 1:
            summary["starts"] = starts
        return summary

    def _report_so_far(self) -> None:
        """Write summary and report of a run that goes on, which hold when it is killed: so seldom that they take a hundredth of the
        run's time at most."""
        began = time.monotonic()
        if not self.keep or began < self._report_due:
            return
        try:
            self.directory.write_summary(self._sum_up({"status": RUNNING, "run": self.directory.path.name}))
            write_report(self.directory.path)
        except Exception as error:  # the run matters more, and its end says what cannot be written
            if not isinstance(error, OSError):
                self.note(f"warning: no report of the run so far: {type(error).__name__}: {error}")
        now = time.monotonic()
        self._report_due = now + max(REPORT_EVERY_S, 100 * (now - began))

    def _close(self, summary: dict[str, Any]) -> None:
        self._sum_up(summary)
        with self._losses.of(self.directory.summary.name):
            self.directory.write_summary(summary)
        with self._losses.of(self.directory.report.name):
            write_report(self.directory.path)
        for tracker in self._trackers:
            with self._losses.of(tracker.name):
                tracker.close()
        self._losses.tell()
        if summary["status"] != "failed":
            self.console.print(closing_table(summary))
            if (why := summary.get("nothing_learnt")) is not None:
                self.note(why)

    def _record(self, stage: str, step: int, line: Mapping[str, Any]) -> None:
        with self._losses.of(self.directory.metrics.name):
            self._ledger.write(stage, step, line)
        for tracker in self._trackers:
            with self._losses.of(tracker.name):
                tracker.log(stage, step, line)


def _log(goes_on: bool) -> TextIO | None:
    """Standard output, where it is a file: a full disk ends the run there no more than elsewhere; or a pipe: Ctrl-C ends `| tee`, too,
    and the run has a step to finish then."""
    out = sys.__stdout__
    if out is None or sys.stdout is not out:
        return None
    mode = os.fstat(out.fileno()).st_mode
    return lossy(out.fileno()) if stat.S_ISFIFO(mode) or (goes_on and stat.S_ISREG(mode)) else None
