"""A loaded host: processes that keep its CPUs busy beside what is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# Also of a parent that was killed none stays behind: a child then has another.
SPIN = """
import os
print(flush=True)
while os.getppid() == {parent}:
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Have so many processes spin, each on a CPU as far as there are enough, from the beginning of the block to its end, however it ends."""
    with ExitStack() as stack:
        spinning = []
        for _ in range(count):
            command = [sys.executable, "-I", "-S", "-c", SPIN.format(parent=os.getpid())]
            one = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            stack.enter_context(one)  # waits for its end
            stack.callback(one.kill)
            spinning.append(one)
        for one in spinning:
            one.stdout.readline()  # type: ignore[union-attr]
        yield
