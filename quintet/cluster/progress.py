"""How far a call has come: ranks post counts to Ray's key-value store, the controller reads them while it waits.

A rank cannot be asked while it works, and results come at the end of a call only. Short calls post nothing, so
this costs nothing where a step takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

TURN_VARIABLE = "QUINTET_TURN_FILE"
"""Environment variable by which a rank learns where it writes what it is at."""
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


_turn_file: int | None = None


def turn(text: str) -> None:
    """Say what this rank is at, for the report of a hang; "" for nothing. It goes to a file beside the rank's log, because a rank that
    waits in a collective, or is aborted there, answers nobody. Outside a worker group nothing is written."""
    global _turn_file
    if (path := os.environ.get(TURN_VARIABLE)) is None:
        return
    with contextlib.suppress(OSError):  # a full disk ends no rank
        if _turn_file is None:
            _turn_file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        os.pwrite(_turn_file, text.encode(), 0)
        os.ftruncate(_turn_file, len(text.encode()))


def read_turn() -> str:
    """Return what this rank said last that it was at."""
    path = os.environ.get(TURN_VARIABLE)
    return Path(path).read_text() if path is not None and _turn_file is not None else ""


def _post(key: str, done: int) -> None:
    from quintet.cluster.ray_compat import post

    post(key, str(done))
