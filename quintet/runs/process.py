"""What a process finds around it."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def put_back(names: MutableMapping[str, Any]) -> Iterator[None]:
    """Give a mapping, such as the environment, what it held back after the block; it is never empty in between, for other threads read it."""
    before = dict(names)
    try:
        yield
    finally:
        for name in names.keys() - before.keys():
            del names[name]
        names.update(before)
