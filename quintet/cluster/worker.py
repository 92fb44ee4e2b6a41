"""The base class of what runs on a rank: knows its place and joins the process group.

Importing this module does not import torch, so that a worker's environment can be set first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from quintet.cluster.device_memory import device_held
from quintet.cluster.progress import read_turn
from quintet.errors import OutOfMemory
from quintet.observe.memory import PhasePeaks, memory_peaks
from quintet.plan.out_of_memory import Needs, out_of_memory, says_no_memory

STARTUP_TIMEOUT = timedelta(minutes=10)
"""Ranks come to the first meeting as far apart as their imports take, whatever the time limit of a collective."""


@dataclass(frozen=True)
class Place:
    """A rank's place in its group."""

    rank: int
    world_size: int
    local_rank: int
    """Position among the group's ranks on this node."""
    local_world_size: int
    device: str
    """`cpu`, or the `cuda:i` of this rank as its process sees it."""
    master_host: str
    master_port: int
    collective_timeout_s: float
    master_fd: int | None = None
    """Rank 0 only: the listening socket behind `master_port`, held since the port was found."""
    host: str = "127.0.0.1"
    """This node's address for the run's other ranks: sockets of the run listen there, and on no other."""
    threads: int = 1
    """OMP_NUM_THREADS of whoever started the run, or this rank's share of its node's cores."""


class Worker:
    """The worker of one rank. Subclasses take `place` first, add keyword arguments, and do their building in `setup`.

    Methods are called through `WorkerGroup`, one at a time, in the process's main thread.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank = place.rank
        self.world_size = place.world_size
        self.device = place.device
        self.peaks = PhasePeaks(place.device)

    def setup(self) -> None:
        """Join the default process group (gloo on CPU; gloo and NCCL by device on GPU)."""
        import torch
        import torch.distributed as dist

        place = self.place
        if place.device == "cpu":
            _keep_freed_memory()
            torch.set_num_threads(place.threads)
            backend = "gloo"
        else:
            torch.cuda.set_device(place.device)
            backend = "cpu:gloo,cuda:nccl"
        store = dist.TCPStore(  # type: ignore[attr-defined]
            place.master_host,
            place.master_port,
            is_master=place.rank == 0,
            timeout=STARTUP_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=place.master_fd,
        )
        store.set(f"arrived/{place.rank}", "")
        store.wait([f"arrived/{rank}" for rank in range(place.world_size)], STARTUP_TIMEOUT)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default", store),  # type: ignore[attr-defined]
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=place.collective_timeout_s),
            device_id=None if place.device == "cpu" else torch.device(place.device),
        )

    @contextmanager
    def at_work(self, phase: str) -> Iterator[None]:
        """Count memory to this phase for as long as the context lasts. Raises OutOfMemory for what says that there is none left."""
        try:
            with self.peaks(phase):
                yield
        except (RuntimeError, MemoryError) as error:
            said = says_no_memory(error)
            if said is None:
                raise
            turn = read_turn()
            where = f"{phase}, at {turn}" if turn else phase
            held = device_held(self.device)
            needs = self.memory_needed(held.total if held else None)
            raise OutOfMemory(out_of_memory(where, said, held, needs)) from error

    def memory_needed(self, device_bytes: int | None) -> Needs:
        """Return what the rank needs by the memory formula, and settings that need less. Of a rank that is not set up yet, too."""
        return Needs()

    def memory(self) -> dict[str, float | None]:
        """Return the peak memory of this rank so far, and of each phase since the last time it was asked."""
        return memory_peaks(self.peaks.tree) | self.peaks.take()

    def coords(self) -> dict[str, int]:
        """Return the position on each mesh axis (`tp`, `pp`, `cp`, `dp`), for the dispatch protocols; here: all ranks are dp."""
        return {"tp": 0, "pp": 0, "cp": 0, "dp": self.rank}


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory. By default it gives every large block back to the kernel, which then zeroes it
    page by page when the next tensor of that size comes: about a seventh of a CPU training step."""
    import ctypes

    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # not glibc
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # from malloc.h
    for option, value in ((mmap_threshold, 1 << 30), (trim_threshold, (1 << 31) - 1), (top_pad, 64 << 20)):
        mallopt(option, value)
