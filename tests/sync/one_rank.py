"""One trainer rank, in the process of the test, and what it holds."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_work import MODELS
from quintet.engine.weights.shards import Box, Shard
from quintet.rollout.base import Wanted
from quintet.sync.server import WeightServer
from tests.patience import BUSY

NAMES = ("a", "b", "c", "d")
ROWS = 256  # of 1 KiB each: a tensor is a quarter of a MiB, and fills a bucket


class Watched(Shard):
    """A shard that tells when it is read."""

    standing = False
    read: threading.Event

    def part(self, box: Box) -> torch.Tensor:
        self.read.set()
        return super().part(box)


def shards() -> list[Watched]:
    found = []
    for number, name in enumerate(NAMES):
        one = Watched(name, (ROWS, 256), ((0, ROWS), (0, 256)), torch.full((ROWS, 256), float(number)))
        one.read = threading.Event()
        found.append(one)
    return found


def server_of(
    held: list[Any],
    bucket_mib: float = 0.25,
    timeout_s: float = 20.0,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> WeightServer:
    shape = MODELS["tiny"].shape
    return WeightServer(lambda: held, shape, torch.float32, device, bucket_mib, timeout_s=timeout_s)


def boxes(*names: str) -> list[Wanted]:
    return [Wanted(name, ((0, ROWS), (0, 256))) for name in names]


def shared_memory() -> int:
    """Bytes that this process shares to send weights, each piece of memory once."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:quintet-sync" in line:
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            found[line.split()[4]] = last - first
    return sum(found.values())


def shared_memory_left() -> int:
    """What of it is left after a server was closed: a process group lets go of it in its own time, errors of tests before when they are
    collected."""
    gc.collect()
    deadline = time.monotonic() + 15 * BUSY
    while shared_memory() and time.monotonic() < deadline:
        time.sleep(0.05)
    return shared_memory()
