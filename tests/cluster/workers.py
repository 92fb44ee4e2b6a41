"""Workers for the cluster's tests; imported by the ranks, so it imports nothing that is slow."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from quintet.cluster.lane import listening
from quintet.cluster.progress import Progress, turn
from quintet.cluster.worker import Place, Worker
from quintet.errors import RolloutMismatch, SyncFailure, SyncMismatch, UserError, WorkerFailure
from quintet.plan.out_of_memory import Needs


class Light(Worker):
    """A rank without torch: starts fast."""

    def __init__(self, place: Place, mesh: tuple[int, int, int] = (1, 1, 4)) -> None:
        super().__init__(place)
        self.mesh = mesh

    def setup(self) -> None:
        pass

    def coords(self) -> dict[str, int]:
        tp, cp, dp = self.mesh
        rank, position = self.rank, {}
        for axis, size in (("tp", tp), ("cp", cp), ("dp", dp)):
            position[axis], rank = rank % size, rank // size
        return {**position, "pp": rank}

    def tell(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        return self.rank, args, kwargs

    def environment(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def facts(self) -> dict[str, Any]:
        return {
            "main": threading.current_thread() is threading.main_thread(),
            "torch": "torch" in sys.modules,
            "node": self.place.local_rank,
            "pid": os.getpid(),
        }

    def make(self, n: int) -> tuple[int, bytes]:
        return n, bytes([self.rank]) * n

    def fail(self, how: str, rank: int) -> str:
        if self.rank == rank:
            inner_fail(how)
        return "done"

    def count(self, units: int, seconds: float) -> None:
        progress = Progress()
        progress.begin()
        for done in range(1, units + 1):
            time.sleep(seconds)
            progress(done)

    def steps(self, how: str, name: str, steps: int, seconds: float) -> Iterator[Any]:
        """Tells each step; what is said beside it; whether it runs in the main thread. how: what happens at the last but one."""
        said: list[str] = []
        verbs = ("pause", "resume", "abort")
        with listening(name, {verb: partial(said.append, verb) for verb in verbs}):
            for step in range(steps):
                time.sleep(seconds)
                if step == steps - 1 and how:
                    inner_fail(how)
                told = list(said)
                yield step, told, threading.current_thread() is threading.main_thread()
                if "abort" in told:
                    break
        return self.rank, bytes(1_000_000)

    def sleep(self) -> None:
        print("about to sleep")
        time.sleep(1000)

    def have_a_child(self) -> None:
        """One that does not end with this process."""
        self.child = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    def stop_yourself(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Stillborn(Light):
    """One rank of it does not get through its setup."""

    def __init__(self, place: Place, how: str) -> None:
        super().__init__(place)
        self.how = how

    def setup(self) -> None:
        if self.rank == 1:
            inner_fail(self.how)


class Collective(Light):
    """A rank in a gloo group."""

    def setup(self) -> None:
        Worker.setup(self)

    def ping(self) -> None:
        """Answer."""

    def total(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        x = torch.tensor([value])
        dist.all_reduce(x)
        return x.item()

    def memory_needed(self, device_bytes: int | None) -> Needs:
        return Needs({"parameters": 3 << 30, "other": 1 << 29}, [("engine.recompute=full", 1 << 30)])

    def meet(self, hows: list[str]) -> float:
        """`hows[rank]`: 'come' enters an all_reduce; anything else happens instead, a micro-batch earlier."""
        turn(f"micro-batch {2 if hows[self.rank] == 'come' else 1} of 3")
        if hows[self.rank] != "come":
            inner_fail(hows[self.rank])
            return 0.0
        return self.total(1.0)


NO_MEMORY = {
    "torch's memory": "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which",
    "NCCL's memory": "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.28.9\nncclUnhandledCudaError: Call to "
    "CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes: Cuda failure 2 'out of memory'",
    "a host's memory": "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
}
"""What torch and NCCL say, in their classes or as plain RuntimeErrors."""


def inner_fail(how: str) -> None:
    if how == "raise":
        raise LookupError("expert 7 is missing")
    if how == "user":
        raise UserError("model.path: no such directory")
    if how == "mismatch":
        raise SyncMismatch("model.norm.weight differs")
    if how == "sync":
        raise SyncFailure("receiver rollout-1 rank 0 device 0: nothing came from the trainer within 1 s")
    if how == "disagree":
        raise RolloutMismatch("the log-probs are apart")
    if how == "engine":
        raise WorkerFailure("vLLM: VLLM::Worker_TP1 (process 7) died", phase="generate")
    if how in NO_MEMORY:
        raise RuntimeError(NO_MEMORY[how])
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(7)
    if how == "kill":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "sleep":
        oversleep()
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hold the lock":
        hold_the_lock()


def oversleep() -> None:
    time.sleep(1000)


def hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter's lock
