"""The errors quintet raises on purpose, and the exit code each gives the command line.

Anything the user can put right is a `UserError`: its message says what is wrong, where, and what to do, and
is printed without a traceback. Everything else is a bug, and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path


class QuintetError(Exception):
    """Base of the errors raised on purpose; `exit_code` is what the command line ends with. `message` is what it prints, to
    which those who know what the user can do about it may add."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class UserError(QuintetError):
    """Bad input: a recipe, a file, a missing package. The message stands on its own."""

    exit_code = 2


@contextmanager
def reading(file: Path | str, how: str = "read") -> Iterator[None]:
    """Raise UserError naming a file, or a recipe's key and its file, for what the system has against reading it within the block."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{file} cannot be {how}: {error.strerror}") from None


writing = partial(reading, how="written")
"""As `reading`, of a file that is written."""


class DamagedCheckpoint(UserError):
    """Files of a checkpoint are not as they were written; `checkpoint` is its directory, where that is known."""

    def __init__(self, message: str = "", checkpoint: Path | None = None) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


class Stopped(QuintetError):
    """SIGTERM or Ctrl-C ended the run, after a step whose state is saved if the recipe saves any, or else its policy."""

    def __init__(self, message: str = "", exit_code: int = 143) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class WorkerFailure(QuintetError):
    """A rank died or hung, which ends the run.

    The message names rank and phase in words; the attributes are for code. `rank` is None when no single rank
    is to blame (a collective that some ranks never reached). `traceback` is the worker's own traceback text;
    `stacks` maps a rank to the text of its Python stacks.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        traceback: str | None = None,
        stacks: dict[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.traceback = traceback
        self.stacks = stacks or {}

    def __reduce__(self) -> tuple[object, ...]:
        """Keyword-only arguments do not survive the default pickling of exceptions, which Ray relies on."""
        options = {name: getattr(self, name) for name in ("rank", "phase", "traceback", "stacks")}
        return partial(WorkerFailure, **options), (self.message,)

    def __str__(self) -> str:
        parts = [self.message]
        if self.traceback:
            parts.append("Original traceback of the worker:\n" + self.traceback.rstrip())
        parts += [f"Stacks of rank {rank}:\n{text.rstrip()}" for rank, text in sorted(self.stacks.items())]
        return "\n\n".join(parts)


class OutOfMemory(QuintetError):
    """The memory of a rank's device, or of its host, did not suffice, which ends the run. The message says what held how much, and what to
    change."""

    exit_code = 3


class RayFailure(QuintetError):
    """A process of Ray's own died, which ends the run. The message names it, and its log."""

    exit_code = 3


class RolloutMismatch(QuintetError):
    """The rollout's log-probs of a step's tokens are further from the trainer's than the recipe allows."""

    exit_code = 6


class SyncMismatch(QuintetError):
    """Rollout and trainer do not hold the same weights after a sync. The message names the tensors."""

    exit_code = 5


class SyncFailure(QuintetError):
    """New weights did not reach a rollout. The message names the receiver, and what went wrong."""

    exit_code = 3
