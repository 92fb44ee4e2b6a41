"""Records that the disk does not take: dropped and counted, told once a run, and how many when it takes them again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quintet.errors import UserError

AT_MOST_EVERY_S = 60.0
"""Between two lines that say what was left out: a disk may be full and free by turns."""


class Losses:
    """Records of one run that the disk refused. goes_on: whether the run does, or ends with the first record that is refused.
    say: shows a line."""

    def __init__(self, goes_on: bool, say: Callable[[str], None]) -> None:
        self.total = 0
        """Records that were left out so far."""
        self._goes_on, self._say = goes_on, say
        self._failing: set[str] = set()
        self._lost: Counter[str] = Counter()
        """Of what was not told yet."""
        self._told_at = -AT_MOST_EVERY_S

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Note the loss where the disk refuses a record of `what` ("metrics.jsonl") that is written within the block.

        Raises UserError naming the file where the disk refuses it and the run is to end with that.
        """
        try:
            yield
        except (UserError, OSError) as error:
            told = str(error)
            if isinstance(error, OSError):
                told = f"{error.filename or what} cannot be written: {error.strerror or error}"
            if not self._goes_on:
                raise UserError(told) from None
            if not self.total:
                self._say(
                    f"warning: {told}; what the disk does not take of metrics, samples and logs is left out. Training goes on "
                    "(checkpoint.on_error=continue)"
                )
            self._failing.add(what)
            self._lost[what] += 1
            self.total += 1
        else:
            if what in self._failing:
                self._failing.remove(what)
                if not self._failing and time.monotonic() - self._told_at >= AT_MOST_EVERY_S:
                    self._told_at = time.monotonic()
                    self._say(f"the disk takes records again; {self._shown()}")
                    self._lost.clear()

    def tell(self) -> None:
        """Say at the end of a run what is missing, of what was not told yet."""
        if self._lost:
            self._say(f"the disk was full {'at the end' if self._failing else 'again'}; {self._shown()}")

    def _shown(self) -> str:
        return f"left out were {', '.join(f'{count} of {what}' for what, count in self._lost.items())}"
