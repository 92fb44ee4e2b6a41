"""Worker processes that live as long as the test session, for tests that need several ranks but not Ray.

Starting a process that has imported torch and megatron costs seconds; a layout test costs milliseconds. So the
processes are started once (from a fork server that has done the imports) and every test borrows them:

    def norms(scale: float) -> float:            # a top-level function of the test module
        x = torch.full((2,), scale * (dist.get_rank() + 1))
        dist.all_reduce(x)
        return x.norm().item()

    def test_norms(pool):
        assert pool.run(norms, 2, 1.0) == ...    # one result a rank

Inside the function the default process group (gloo; on GPU machines NCCL as well) has exactly `world_size` ranks, whatever the pool's size.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FORKED = ["tests.forked"]
"""What all that fork in these tests have the server import."""
NAME = "test-rank-"
"""How the names of a pool's processes begin."""
GRACE_S = 2.0  # how long ranks that are still running get after the first one failed


class PoolError(AssertionError):
    """A rank raised, died or took too long; the message carries its traceback or its stacks."""


class Pool:
    """Up to `size` processes, started when first needed and replaced after a failure."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        # What the fork server has imported may have started CUDA, which no process that is forked from it can use then.
        self._context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        self._context.set_forkserver_preload(FORKED)
        self._workers: list[tuple[Any, Connection]] = []
        self._store: dist.TCPStore | None = None
        self._group = (0, 0)  # number and world size of the process group of the latest run
        self._stacks = tempfile.TemporaryDirectory(prefix="quintet-pool-")
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 280.0, **kwargs: Any
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on ranks 0..world_size-1 at once; returns the results in rank order.

        `fn` and everything passed or returned must pickle (tensors travel by value). Raises PoolError when any
        rank raises, dies, or is not done after `timeout_s` seconds; the pool is then started anew at the next run.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size {world_size} is not within 1..{self.size}, the size of this pool")
        self._start(world_size)
        assert self._store is not None
        if self._group[1] != world_size:
            if torch.cuda.is_available() and self._group[1]:
                self.close()  # NCCL's groups end only with all their ranks: new processes then
                self._start(world_size)
                assert self._store is not None
            self._group = (self._group[0] + 1, world_size)
        call = pickle.dumps((fn, args, kwargs))
        try:
            for rank, (_, pipe) in enumerate(self._workers[:world_size]):
                pipe.send((self._group, rank, self._store.port, sys.path, call, timeout_s))
            results, errors = self._collect(world_size, timeout_s)
        except BaseException:
            # A test's time limit: what comes of this call must not be taken for the next one's answer.
            self.close()
            raise
        if errors:
            self.close()
            raise PoolError(f"{fn.__module__}.{fn.__qualname__} on {world_size} ranks\n" + "\n".join(errors))
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End every process now, and what it started; the next `run` starts new ones."""
        for process, pipe in self._workers:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also of one that has died itself
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers, self._store, self._group = [], None, (self._group[0], 0)

    def _start(self, world_size: int) -> None:
        if any(not process.is_alive() for process, _ in self._workers):
            self.close()
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(len(self._workers), world_size):
            ours, theirs = self._context.Pipe()
            # Not a daemon: megatron's checkpoint writers are children of their own.
            arguments = (theirs, Path(self._stacks.name) / str(rank))
            process = self._context.Process(target=_serve, args=arguments, name=f"{NAME}{rank}")
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, world_size: int, timeout_s: float) -> tuple[dict[int, Any], list[str]]:
        """Results by rank, and one text for each rank that failed, in the order in which they failed."""
        results: dict[int, Any] = {}
        errors: list[str] = []
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world_size])}
        deadline = time.monotonic() + timeout_s + GRACE_S
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                errors += [f"rank {rank} gave no answer" for rank in waiting.values()]
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    ok, value = False, self._epitaph(rank)
                if ok:
                    results[rank] = value
                else:
                    if not errors:
                        deadline = time.monotonic() + GRACE_S
                    errors.append(f"--- rank {rank} ---\n{value}")
        return results, errors

    def _epitaph(self, rank: int) -> str:
        process, _ = self._workers[rank]
        process.join(1)
        stacks = (Path(self._stacks.name) / str(rank)).read_text()
        return f"the process ended with exit code {process.exitcode}\n{stacks}"


def _serve(pipe: Connection, stacks: Path) -> None:
    """A worker's life: receive a call, run it in a process group of its size, send the outcome back."""
    joined = (0, 0)
    # Of this group is what a call starts, too: megatron's saves leave a process that serves a queue until it is killed.
    os.setpgid(0, 0)
    # Up to eight compute at once: tests that start processes beside them would get a ninth of the machine, and those that
    # start Ray, whose workers run at 15, a twentieth.
    os.nice(19)
    with stacks.open("w") as stacks_file, contextlib.suppress(EOFError):
        faulthandler.enable(stacks_file)
        while True:
            group, rank, port, path, call, timeout_s = pipe.recv()
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=stacks_file)
            try:
                sys.path[:] = path
                importlib.invalidate_caches()
                if joined != group:
                    _join(group, rank, port)
                    joined = group
                fn, args, kwargs = pickle.loads(call)
                answer = pickle.dumps((True, fn(*args, **kwargs)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(answer)


def _join(group: tuple[int, int], rank: int, port: int) -> None:
    """Replace the default process group by the one with this number and world size."""
    number, world_size = group
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(rank % gpus)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        store=dist.PrefixStore(f"group {number}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
