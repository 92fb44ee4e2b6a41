"""Memory peaks of this process, its children and its devices, in GiB."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

GIB = 1024.0**3
PHASES = ("generate", "logprob", "train", "sync", "checkpoint")
"""Whose peaks are told apart. checkpoint: of a load, or of a save's copies and of looks whether it is written."""
RESTING = "resting_host_gib"
"""Of a rank that is in no phase."""
EVERY_S = 0.05
"""How often a phase's use of memory is looked at."""
WALK_S = 10.0
"""How often the process table is walked, which takes milliseconds, and on a host with many processes tens of them: other threads wait meanwhile."""


def memory_peaks(tree: Tree | None = None) -> dict[str, float | None]:
    """Return the peaks so far: `host_gib` (resident, of this process and those below it that are there now), `device_gib`
    (allocated by torch in this process; None without CUDA); and what is resident now, RESTING. tree: of these processes, which are those
    that it found when it last looked."""
    tree = tree or Tree()
    return {"host_gib": tree.sum_of(_peak_of), "device_gib": device_peak(), RESTING: tree.resident()}


class Tree:
    """The tree of this process and all below it: what vLLM has started counts. Pages that several of them map count for each."""

    def __init__(self, every_s: float = WALK_S) -> None:
        self._every_s, self._walked = every_s, float("-inf")
        self._processes: list[psutil.Process] = []

    def resident(self) -> float:
        """Return what the processes hold in memory now, GiB."""
        return self.sum_of(_resident_of)

    def sum_of(self, measure: Callable[[psutil.Process], float]) -> float:
        """Return the sum of a measure of each process."""
        if time.monotonic() - self._walked >= self._every_s:
            this = psutil.Process()
            self._processes, self._walked = [this, *this.children(recursive=True)], time.monotonic()
        total = 0.0
        for process in self._processes:
            with suppress(psutil.Error, OSError):  # it ended while we looked
                total += measure(process)
        return total


def combine_peaks(peaks: Iterable[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the peaks of several processes as metrics, memory/ before each name; host_gib and device_gib are always there.

    Host memory is summed: an upper bound of what was needed at once, since peaks need not coincide. Device
    memory is the largest of any rank, the one that runs out first. Ranks that had no part in a phase are there meanwhile:
    of them counts what they hold now.
    """
    ranks = list(peaks)
    phases = {name for one in ranks for name in one if name.endswith("_host_gib") and name != RESTING}
    by_name: dict[str, list[float]] = {"host_gib": [], "device_gib": []}
    for one in ranks:
        told = dict.fromkeys(phases, one.get(RESTING)) | {k: v for k, v in one.items() if k != RESTING}
        for name, value in told.items():
            by_name.setdefault(name, []).extend([] if value is None else [value])
    return {
        f"memory/{name}": (sum(found) if name.endswith("host_gib") else max(found)) if found else None
        for name, found in by_name.items()
    }


def device_peak() -> float | None:
    """Return the peak of what torch allocated on its fullest CUDA device; None where torch was not imported or has no CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())) / GIB


class PhasePeaks:
    """Peaks of memory in each phase of a step: `with peaks("train"): …`, and `take` what there was since it was last asked.

    Neither the kernel nor the device can be asked for the peak of a stretch of time, so a thread looks every few
    milliseconds, while a phase lasts: at the resident memory of this process and those below it, and at what is in use on its
    device, whoever uses it: a rollout in another process counts, and so does what torch holds without need. Without CUDA
    device peaks are None.
    """

    def __init__(self, device: str, walk_s: float = WALK_S) -> None:
        self._device = device
        self._peaks: dict[str, tuple[float, float | None]] = {}
        self._phase: str | None = None
        self._lock = threading.Lock()
        self.tree = Tree(walk_s)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count to this phase for as long as the context lasts, if it is one of PHASES."""
        if phase not in PHASES:
            yield
            return
        self._phase, over = phase, threading.Event()
        self._look()
        threading.Thread(target=self._watch, args=(over,), daemon=True, name="memory peaks").start()
        try:
            yield
        finally:
            over.set()
            self._look()
            self._phase = None

    def take(self) -> dict[str, float | None]:
        """Return `<phase>_host_gib` and `<phase>_device_gib` of the phases since the last call, which starts them anew."""
        with self._lock:
            peaks, self._peaks = self._peaks, {}
        told: dict[str, float | None] = {}
        for phase, (host, device) in peaks.items():
            told |= {f"{phase}_host_gib": host, f"{phase}_device_gib": device}
        return told

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        host, device = self.tree.resident(), device_in_use(self._device)
        with self._lock:
            if (phase := self._phase) is None:
                return
            most, most_on_device = self._peaks.get(phase, (0.0, None))
            if device is not None:
                most_on_device = max(device, most_on_device or 0.0)
            self._peaks[phase] = max(host, most), most_on_device


def device_in_use(device: str) -> float | None:
    """Return GiB in use on a CUDA device, by all processes; None for a CPU, and before this process has started CUDA."""
    torch = sys.modules.get("torch")
    if device == "cpu" or torch is None or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return float((total - free) / GIB)


def _resident_of(process: psutil.Process) -> float:
    return float(process.memory_info().rss / GIB)


def _peak_of(process: psutil.Process) -> float:
    """What it held at most (VmHWM: getrusage's peak starts from the parent's size after a fork), or holds now where the kernel
    does not tell or it has ended."""
    try:
        text = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _resident_of(process)
    found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 / GIB if found else _resident_of(process)
