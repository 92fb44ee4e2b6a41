"""A call under way in another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class Call:
    """`function(*args)` in a thread. progress: samples done, where `wait_for_some` looked at the rollout's."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self.rollout: Any = None
        self._thread = threading.Thread(target=self._run, args=(function, *args), daemon=True)
        self.done = 0
        function.__self__._progress = self._count  # type: ignore[attr-defined]
        self._thread.start()

    def _count(self, done: int) -> None:
        self.done = done

    def _run(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._result = function(*args)
        except BaseException as error:
            self._error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait_for_some(self, count: int = 3, timeout_s: float = 60) -> None:
        """Until some samples are done."""
        end = time.monotonic() + timeout_s
        while self.done < count and not self.ended:
            assert time.monotonic() < end
            time.sleep(0.002)

    def result(self, timeout_s: float = 120) -> Any:
        self._thread.join(timeout_s)
        assert self.ended, "still under way"
        if self._error is not None:
            raise self._error
        return self._result
