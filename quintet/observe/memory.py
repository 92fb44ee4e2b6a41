"""Memory peaks of this process, its children and its devices, in GiB."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

GIB = 1024.0**3


def memory_peaks() -> dict[str, float | None]:
    """This process's peaks so far: `host_gib` (resident), `device_gib` (allocated by torch; None without CUDA)."""
    return {"host_gib": _host_peak(), "device_gib": device_peak()}


def combine_peaks(peaks: Iterable[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The peaks of several processes as metrics.

    Host memory is summed: an upper bound of what was needed at once, since peaks need not coincide. Device
    memory is the largest of any rank, the one that runs out first.
    """
    peaks = list(peaks)
    host = [value for one in peaks if (value := one.get("host_gib")) is not None]
    device = [value for one in peaks if (value := one.get("device_gib")) is not None]
    return {"memory/host_gib": sum(host) if host else None, "memory/device_gib": max(device, default=None)}


def device_peak() -> float | None:
    """Peak of what torch allocated on its fullest CUDA device; None where torch was not imported or has no CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())) / GIB


class HostMemory:
    """Peak of the resident memory of this process and all below it, looked at from time to time.

    Walking the process table costs milliseconds, so it is done at most once in `every_s` seconds.
    """

    def __init__(self, every_s: float = 2.0) -> None:
        self._every_s = every_s
        self._last = float("-inf")
        self.peak_gib = 0.0

    def look(self) -> float:
        """The peak so far, in GiB."""
        now = time.monotonic()
        if now - self._last >= self._every_s:
            self._last = now
            self.peak_gib = max(self.peak_gib, _tree_resident())
        return self.peak_gib


def _tree_resident() -> float:
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:  # It ended while we looked.
            continue
    return float(total / GIB)


def _host_peak() -> float:
    """VmHWM where there is one: getrusage's peak starts from the parent's size after a fork."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024 / GIB
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
