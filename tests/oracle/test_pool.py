"""The pool itself: right ranks, right group, errors that say what happened, and life after them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.managers import SyncManager
from types import FrameType

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.oracle.pool import Pool, PoolError
from tests.patience import BUSY


def total(scale: float) -> tuple[int, int, float]:
    x = torch.tensor([scale * (dist.get_rank() + 1)])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise LookupError("no such expert")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def sleep_forever() -> None:
    time.sleep(1000)


def serve_a_queue() -> int:
    """As megatron's saves do."""
    manager = multiprocessing.get_context("spawn").Manager()
    kept.append(manager)
    return manager._process.pid


kept: list[SyncManager] = []


@pytest.mark.parametrize("dies_first", [False, True])
def test_what_ranks_started_ends_with_them(dies_first: bool) -> None:
    pool = Pool(size=1)
    (pid,) = pool.run(serve_a_queue, 1)
    if dies_first:
        with pytest.raises(PoolError):
            pool.run(die_on, 1, 0)
    pool.close()
    deadline = time.monotonic() + 10 * BUSY
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_group_has_the_world_size_asked_for(pool: Pool) -> None:
    for world_size in (2, 4, 1, 4, 2):
        expected = sum(range(1, world_size + 1)) * 2.0
        results = pool.run(total, world_size, 2.0)
        assert results == [(rank, world_size, expected) for rank in range(world_size)]


def test_processes_are_reused(pool: Pool) -> None:
    assert pool.run(os.getpid, 2) == pool.run(os.getpid, 2)


def answer_late(what: str) -> str:
    time.sleep(0.5)
    return what


def test_a_call_that_was_left_answers_no_later_one(pool: Pool) -> None:
    """As by the time limit of a test."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    pool.run(answer_late, 1, "first")  # its process is there
    before = signal.signal(signal.SIGUSR2, leave)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(TimeoutError):
            pool.run(answer_late, 1, "second")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert pool.run(answer_late, 1, "third") == ["third"]


def test_failures_are_told_and_the_pool_lives_on(pool: Pool) -> None:
    started = time.monotonic()
    with pytest.raises(PoolError, match=r"rank 1 ---\nTraceback(.|\n)*raise_on(.|\n)*no such expert"):
        pool.run(raise_on, 2, 1)
    with pytest.raises(PoolError, match="rank 0 ---\nthe process ended with exit code 7"):
        pool.run(die_on, 2, 0)
    with pytest.raises(PoolError, match="sleep_forever"):
        pool.run(sleep_forever, 2, timeout_s=0.5)
    assert pool.run(total, 2, 1.0)[1] == (1, 2, 3.0)
    assert time.monotonic() - started < 30 * BUSY  # a run's own limit is 280 s
