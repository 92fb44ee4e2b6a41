"""How long tests let things take: they share the machine with other tests, and with whatever else it does."""

import math
import time
from collections.abc import Callable

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
