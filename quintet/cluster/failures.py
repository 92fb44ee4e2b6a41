"""From what the ranks report to the one message a user reads.

When a rank fails, the others fail after it: their collectives are cut off or time out. So the first report is rarely
alone and not always the cause. The cause is the first failure that is not one of communication; when all that is
known is that collectives waited too long, it is a hang, told with the stacks of the ranks that wait and of those
that never came.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from quintet.cluster.process_probe import Report
from quintet.errors import (
    DamagedCheckpoint,
    OutOfMemory,
    QuintetError,
    RolloutMismatch,
    SyncFailure,
    SyncMismatch,
    UserError,
    WorkerFailure,
)

# What gloo, NCCL and torch's store say. Tested with gloo on CPU; the NCCL wordings are from torch's sources.
_TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms|[Ww]ait timeout|Watchdog caught collective operation timeout|Socket Timeout"
    r"|timed out after \d+ ?ms|Application timeout caused pair closure",
)
_CUT_OFF = re.compile(
    r"Connection (closed|reset) by peer|gloo/transport|ncclRemoteError|ncclSystemError|Broken pipe|NCCL communicator"
    r"|Failed to (recv|send), got 0 bytes|Connection was likely closed|connectFullMesh failed",
)

_TOLD: tuple[type[QuintetError], ...] = (
    DamagedCheckpoint,
    UserError,
    SyncMismatch,
    SyncFailure,
    RolloutMismatch,
    OutOfMemory,
)
"""Errors that a rank raises on purpose: their message is all there is to say, and their class decides the exit code."""


@dataclass(frozen=True)
class Failure:
    """One rank's failure, as text: exceptions themselves need not survive pickling."""

    rank: int
    summary: str
    """One line."""
    traceback: str = ""
    communication: bool = False
    """It may be no more than the echo of another rank's failure."""
    timed_out: bool = False
    """A collective waited too long."""
    raised: type[QuintetError] | None = None
    """Of an error that was raised on purpose: its class, of which the summary is the message."""
    died: bool = False
    """The process is gone."""
    log_tail: str = ""
    turn: str = ""
    """What the rank said it was at."""

    @staticmethod
    def of_exception(rank: int, error: BaseException, skip_file: str) -> Failure:
        """Make a failure from an exception caught in the worker; frames of `skip_file` at the outer end are left out."""
        for told in _TOLD:
            if isinstance(error, told):
                # Weights stop coming when the trainer fails, which then says why.
                return Failure(rank, str(error), communication=told is SyncFailure, raised=told)
        if isinstance(error, WorkerFailure):  # of a process that the worker itself has started
            return Failure(rank, error.message, error.traceback or "")
        trace: TracebackType | None = error.__traceback__
        while (
            trace is not None and trace.tb_frame.f_code.co_filename == skip_file and trace.tb_next is not None
        ):
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        if isinstance(error, SystemExit):
            return Failure(rank, f"it called sys.exit({error.code!r})", text)
        timed_out = bool(_TIMED_OUT.search(str(error)))
        communication = timed_out or _is_communication(error)
        first_line = str(error).strip().split("\n", 1)[0]
        name = type(error).__name__
        return Failure(rank, f"{name}: {first_line}" if first_line else name, text, communication, timed_out)

    @staticmethod
    def of_death(rank: int, report: Report, ray_says: str = "") -> Failure:
        """Make a failure from the end of its process, with what the probe found."""
        ended = report.state
        if "running low on memory" in ray_says:
            ended = "killed by Ray, because its node was running low on memory"
        # An NCCL wait that lasts too long does not raise: torch's watchdog thread aborts the process, whose stacks
        # faulthandler then writes. (Not tested on a GPU.)
        timed_out = "Watchdog caught collective operation timeout" in report.log_tail
        failure = Failure(rank, ended, report.stacks, timed_out, timed_out, died=True)
        return replace(failure, log_tail=report.log_tail, turn=report.turn)


def _is_communication(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, (RuntimeError, ConnectionError)) and bool(_CUT_OFF.search(str(error)))


def root_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure to name, from those known in the order in which they came; None when it is a hang."""
    for failure in failures:
        if not failure.communication:
            return failure
    if any(failure.timed_out for failure in failures):
        return None
    return failures[0]


def explain(
    failures: Sequence[Failure],
    *,
    phase: str,
    timeout_s: float,
    reports: Mapping[int, Report],
    returned: Sequence[int],
    group: str = "",
) -> QuintetError:
    """Return the error to raise. `reports` are of the ranks still at work and `returned` those already done, for a hang. `group`
    is named before its ranks, where that is wanted."""
    cause = root_cause(failures)
    if cause is None:
        return _hang(failures, phase, timeout_s, reports, returned, group)
    rank = f"{group} rank" if group else "Rank"
    if cause.raised is not None:
        names_itself = issubclass(cause.raised, UserError | SyncFailure)
        return cause.raised(cause.summary if names_itself else f"{rank} {cause.rank}: {cause.summary}")
    echoes = [failure.rank for failure in failures if failure is not cause and failure.communication]
    others = [f for f in failures if f is not cause and not f.communication]
    text = f"{rank} {cause.rank} {'died' if cause.died else 'failed'} in {phase}: {cause.summary}"
    for other in others:
        text += f"\n{rank} {other.rank} {'died' if other.died else 'failed'} too: {other.summary}"
    if echoes:
        text += f"\nBecause of it, the collectives of {_ranks(sorted(echoes))} were cut off."
    elif cause.communication:
        text += "\nNo rank is known to have failed before it: look at the network, and at that rank's node."
    if cause.log_tail:
        text += f"\n\nLast lines of the log of rank {cause.rank}:\n{cause.log_tail}"
    return WorkerFailure(text, rank=cause.rank, phase=phase, traceback=cause.traceback or None)


def _hang(
    failures: Sequence[Failure],
    phase: str,
    timeout_s: float,
    reports: Mapping[int, Report],
    returned: Sequence[int],
    group: str,
) -> WorkerFailure:
    waited = {failure.rank: failure.traceback for failure in failures}
    absent: dict[int, str] = {}
    for rank, report in reports.items():
        text = report.stacks or report.state
        if "torch/distributed/" in report.stacks:
            waited[rank] = text
        else:
            absent[rank] = text
    absent |= dict.fromkeys(returned, f"it had returned from {phase} without entering the collective")
    text = f"{f'{group}: a' if group else 'A'} collective waited longer than {timeout_s:g} s (cluster.collective_timeout_s) in {phase}.\n"
    text += f"Waiting in it: {_ranks(sorted(waited))}. "
    text += (
        f"Never came: {_ranks(sorted(absent))}."
        if absent
        else ("All ranks wait: they entered different collectives, or the network between them is down.")
    )
    text += _turns(
        {failure.rank: failure.turn for failure in failures} | {r: one.turn for r, one in reports.items()}
    )
    stacks = {rank: "[waits]\n" + trace for rank, trace in waited.items()}
    stacks |= {rank: "[never came]\n" + trace for rank, trace in absent.items()}
    return WorkerFailure(text, phase=phase, stacks=stacks)


def _turns(turns: Mapping[int, str]) -> str:
    """What the ranks were at, those together that were at the same."""
    at: dict[str, list[int]] = {}
    for rank, turn in sorted(turns.items()):
        if turn:
            at.setdefault(turn, []).append(rank)
    return "".join(f"\nAt {turn}: {_ranks(ranks)}." for turn, ranks in at.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
