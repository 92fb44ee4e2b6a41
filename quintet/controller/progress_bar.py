"""A bar for work that takes a while: how far ranks have come, while the controller waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from quintet.observe.progress import Progress, Task


@contextmanager
def watched(
    progress: Progress | None, title: str, total: int, unit: str, posted: Callable[[], int]
) -> Iterator[Callable[[], None]]:
    """Yield what to call while waiting for `total` units, of which `posted()` are done. The first call opens the bar: short
    work has none."""
    with ExitStack() as stack:
        shown: list[Task] = []

        def watch() -> None:
            if progress is None:
                return
            if not shown:
                shown.append(stack.enter_context(progress.task(title, total, unit, quiet=True)))
            shown[0].advance(max(0, posted() - shown[0].done))

        yield watch
