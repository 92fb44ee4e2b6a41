"""How far a call has come: ranks post counts to Ray's key-value store, the controller reads them while it waits.

A rank cannot be asked while it works, and results come at the end of a call only. Short calls post nothing, so
this costs nothing where a step takes a fraction of a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

FIRST_POST_S = 0.5
POST_EVERY_S = 0.3
KEY_VARIABLE = "QUINTET_PROGRESS_KEY"
"""Environment variable by which a rank learns where it posts."""


def group_prefix(job: str, group: str) -> str:
    """Start of the keys of a worker group; its end keeps "policy-1" apart from "policy-10"."""
    return f"quintet/progress/{job}/{group}/"


class Progress:
    """The counter of a rank's finished units: `begin` with each call, then call it with the units done so far.

    Outside a worker group nothing is posted.
    """

    done_here = 0
    """Of the rank in this process: what the controller reads where it is in it too."""

    def __init__(
        self, post: Callable[[str, int], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._key = os.environ.get(KEY_VARIABLE)
        self._post, self._clock = post or _post, clock
        self._next = clock()

    def begin(self) -> None:
        """Begin to count for a new call."""
        Progress.done_here = 0
        self._next = self._clock() + FIRST_POST_S

    def __call__(self, done: int) -> None:
        """`done` units of this call are done; posted at most every `POST_EVERY_S`."""
        Progress.done_here = done
        now = self._clock()
        if self._key is not None and now >= self._next:
            self._next = now + POST_EVERY_S
            self._post(self._key, done)


def _post(key: str, done: int) -> None:
    from quintet.cluster.ray_compat import post

    post(key, str(done))
