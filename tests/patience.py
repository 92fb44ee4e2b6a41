"""How long tests let things take: they share the machine with other tests, and with whatever else it does."""

import ctypes
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

BUSY = 4
"""What is promised within some seconds may here take so many times as long."""


def processor_s(work: Callable[[], object], tries: int = 3) -> float:
    """Return the least processor time of so many calls, seconds: a machine whose caches others fill takes twice as long for one."""
    best = math.inf
    for _ in range(tries):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def status_bytes(*names: str) -> int:
    """Return the sum of these lines of Linux's /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in names) << 10


def held_bytes() -> int:
    """Return the memory that this process holds. Not counted are pages of files, programs among them, which a kernel takes from who
    does not use them and brings again, and what glibc keeps of freed memory."""
    if sys.platform != "linux":
        return psutil.Process().memory_info().rss
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes("RssAnon", "RssShmem")
