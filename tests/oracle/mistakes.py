"""Mistakes that the oracle must find, each made in a running rank and taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

MISTAKES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}


@contextlib.contextmanager
def made(name: str | None) -> Iterator[None]:
    """Make the mistake of this name, if any."""
    with MISTAKES[name]() if name else contextlib.nullcontext():
        yield
