"""What can be learned about worker processes from outside them, on the node where they run.

A rank that waits in a collective, sleeps, or holds the interpreter's lock cannot answer a call. A signal reaches it
all the same: every worker has `faulthandler` write the Python stacks of all its threads into a file on SIGUSR1, from the
signal handler itself, without the lock. Only a process that the kernel does not let run (stopped, or in
uninterruptible sleep) stays silent, and its state is then the answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

STACK_SIGNAL = signal.SIGUSR1
STACKS_WITHIN_S, GONE_WITHIN_S = 1.5, 1.0
_STOPPED = {
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
}
_STATES = {
    **{state: f"its process {text}" for state, text in _STOPPED.items()},
    psutil.STATUS_DISK_SLEEP: "its process is in uninterruptible sleep in the kernel",
    psutil.STATUS_ZOMBIE: "its process has ended",
}


@dataclass(frozen=True)
class Location:
    """Where Ray has put an actor."""

    node_id: str
    host: str
    gpus: tuple[int, ...]
    cores: int
    pid: int
    created: float
    """The process's start time; tells it from a later process of the same number."""
    oom_kills: int | None
    """Processes that the kernel of its node had killed for memory when it started."""


@dataclass(frozen=True)
class RankProcess:
    """Where a rank's process is to be found."""

    rank: int
    at: Location
    log: Path
    """Its stdout and stderr."""
    log_begins: int
    """Bytes in the log when it started, of a rank of this name that was there before."""
    stacks: Path
    """Where it writes its stacks."""


@dataclass(frozen=True)
class Report:
    """What the probe saw of one process."""

    state: str
    """Why there are no stacks, or how the process ended; empty when there is nothing to say."""
    stacks: str = ""
    log_tail: str = ""
    turn: str = ""
    """What it said it was at (`quintet.cluster.progress.turn`)."""


def turn_file(stacks: Path) -> Path:
    """Return where a rank that writes its stacks here writes what it is at."""
    return stacks.with_suffix(".turn")


def inspect(processes: list[RankProcess]) -> dict[int, Report]:
    """Report on processes of this node, by rank; live ones get `STACKS_WITHIN_S` to write their stacks."""
    before = {process.rank: size(process.stacks) for process in processes}
    asked = {process.rank: before[process.rank] for process in processes if _ask(process)}
    deadline = time.monotonic() + STACKS_WITHIN_S
    grown: dict[int, int] = {}
    waiting = [process for process in processes if process.rank in asked]
    while waiting and time.monotonic() < deadline:
        time.sleep(0.02)
        sizes = {process.rank: size(process.stacks) for process in waiting}
        # Complete once it has grown and then stood still for one turn.
        waiting = [p for p in waiting if not (asked[p.rank] < sizes[p.rank] == grown.get(p.rank))]
        grown = sizes
    return {process.rank: _report(process, asked.get(process.rank)) for process in processes}


def stopped(processes: list[RankProcess]) -> dict[int, str]:
    """Return which of these processes of this node, or of those that they started, the kernel does not let run: by rank, how."""
    found = {}
    for process in processes:
        root, family = _find(process), []
        with contextlib.suppress(psutil.Error):
            family = [] if root is None else [root, *root.children(recursive=True)]
        for one in family:
            # One by one: a child that has ended meanwhile says nothing of the others.
            with contextlib.suppress(psutil.Error):
                if (state := one.status()) in _STOPPED:
                    who = "its process" if one is root else f"its process {one.name()}"
                    found[process.rank] = f"{who} ({one.pid}) {_STOPPED[state]}"
                    break
    return found


def death_report(process: RankProcess) -> Report:
    """Report on a process of this node that Ray says is gone, once it is."""
    # Ray notices the closed socket, which comes a little before the end; and the exit status can be read only
    # between the end and the moment when Ray's raylet, the parent, collects it.
    deadline = time.monotonic() + GONE_WITHIN_S
    status = None
    while status is None and time.monotonic() < deadline:
        if not psutil.pid_exists(process.at.pid):
            break
        status = _exit_status(process.at.pid)
        time.sleep(0.0005)
    report = _report(process, None)
    return replace(report, state=status) if status else report


def _exit_status(pid: int) -> str | None:
    """How a process that is not our child ended, while the kernel still has it (Linux; else None)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            status = int(fields[-1])
            if number := status & 0x7F:
                return f"killed by {signal.Signals(number).name}"
            return f"ended with exit code {status >> 8}"
    return None


def kernel_oom_kills() -> int | None:
    """Return processes that this node's kernel has killed for memory since boot (Linux; else None)."""
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
        return int(found.group(1)) if found else None
    return None


def _ask(process: RankProcess) -> bool:
    """Ask a process for its stacks; False when it is gone or cannot answer."""
    found = _find(process)
    if found is None or found.status() in _STATES or not process.stacks.exists():
        return False
    with contextlib.suppress(OSError):
        os.kill(process.at.pid, STACK_SIGNAL)
        return True
    return False


def _find(process: RankProcess) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process.at.pid)
        if abs(found.create_time() - process.at.created) < 1 and found.status() != psutil.STATUS_ZOMBIE:
            return found
    return None


def _report(process: RankProcess, asked_at: int | None) -> Report:
    found = _find(process)
    written, turn = _read(process.stacks), _read(turn_file(process.stacks))
    log_tail = "\n".join(_read(process.log, process.log_begins).strip().splitlines()[-20:])
    if found is None:
        return Report(_how_it_ended(process, written), tidy(written), log_tail, turn)
    with contextlib.suppress(psutil.Error):
        state = found.status()
        if state in _STATES:
            return Report(f"no answer: {_STATES[state]}", "", log_tail, turn)
    stacks = tidy(written[asked_at:]) if asked_at is not None else ""
    return Report("" if stacks else "no answer", stacks, log_tail, turn)


def _how_it_ended(process: RankProcess, written: str) -> str:
    if fatal := re.search(r"^Fatal Python error: (.*)$", written, re.MULTILINE):
        return f"ended by a fatal error: {fatal.group(1)}"
    before, now = process.at.oom_kills, kernel_oom_kills()
    if now is not None and before is not None and now > before:
        return "killed, most likely by the kernel's out-of-memory killer, which has struck on its node since the start"
    return "ended without a word: killed from outside (kill -9, the out-of-memory killer) or left by os._exit"


def tidy(dump: str) -> str:
    """Return a faulthandler dump without the threads and frames of Ray; the thread that runs the worker comes first."""
    blocks = re.split(r"^(?=(?:Current thread|Thread) 0x)", dump, flags=re.MULTILINE)
    main, others = "", []
    for block in blocks:
        if not block.startswith(("Current thread", "Thread")):
            continue
        frames = [line for line in block.splitlines()[1:] if line.startswith("  File")]
        seat = next((i for i, frame in enumerate(frames) if "quintet/cluster/rank_actor.py" in frame), None)
        if seat is not None:
            main = "main thread (most recent call first):\n" + "\n".join(frames[:seat])
        elif any("/site-packages/ray/" not in frame and "/threading.py" not in frame for frame in frames):
            others.append("another thread (most recent call first):\n" + "\n".join(frames))
        elif any("ray/_private/workers/default_worker.py" in frame for frame in frames):
            main = main or "main thread: idle, waiting for the next call"
    return "\n".join([main, *others]).strip()


def size(path: Path) -> int:
    """Return the bytes of a file; 0 where there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _read(path: Path, begin: int = 0) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")
    return ""
