"""What goes beside a call that runs: what its ranks tell on the way, and what is said to them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import ray

from quintet.cluster.cluster import Cluster
from quintet.cluster.group import WorkerGroup
from quintet.errors import WorkerFailure
from tests.cluster.workers import Light
from tests.patience import BUSY


def submitted(
    group: WorkerGroup, how: list[str], steps: int = 20, seconds: float = 0.1, name: str = "first"
) -> tuple[Any, list[Any]]:
    """A call of `steps`, and where what it tells will be: the time, the rank, and what the rank yields."""
    heard: list[Any] = []
    call = group.stream(Light.steps).submit(how, name, steps, seconds)
    call.heard = lambda rank, piece: heard.append((time.monotonic(), rank, *piece))
    return call, heard


def test_what_ranks_yield_is_heard_while_they_work(quartet: WorkerGroup) -> None:
    call, heard = submitted(quartet, [""] * 4)
    told = call.result()
    ended = time.monotonic()
    assert [rank for rank, _ in told] == [0, 1, 2, 3]
    assert [len(ray.get(blob)) for _, blob in told] == [1_000_000] * 4
    for rank in range(4):
        mine = [one for one in heard if one[1] == rank]
        assert [step for _, _, step, *_ in mine] == list(range(20))
        assert all(main for *_, main in mine)
        assert ended - mine[0][0] > 1.0, "the first step was heard only at the end"
    assert quartet.all(Light.tell)() == [(rank, (), {}) for rank in range(4)]


def test_a_short_call_tells_all_it_yields(pair: WorkerGroup, quartet: WorkerGroup) -> None:
    call, heard = submitted(quartet, [""] * 4, steps=3, seconds=0.0)
    call.result()
    assert len(heard) == 12


@pytest.mark.parametrize("thread", [False, True])
def test_what_is_said_does_not_wait_for_the_call(quartet: WorkerGroup, thread: bool) -> None:
    """By another thread of the controller, or by the one that waits."""
    call, heard = submitted(quartet, [""] * 4, steps=600 * BUSY, name=f"by {thread}")
    came: list[Any] = []

    def say() -> None:
        came.extend(
            quartet.interject(call, f"by {thread}", verb, range(4)) for verb in ("pause", "resume", "abort")
        )

    def watch() -> None:
        if len(heard) >= 4 and not came:
            say()

    if thread:
        speaker = threading.Timer(1.0, say)
        speaker.start()
        call.result()
        speaker.join()
    else:
        call.result(watch)
    assert came == [True, True, True]
    for rank in range(4):
        *_, last = [said for _, at, _, said, _ in heard if at == rank]
        assert [one for one in last if one != "abort"] == ["pause", "resume"]
        assert "abort" in last
    assert not quartet.interject(call, f"by {thread}", "abort", range(4))


def test_ranks_that_are_done_are_not_waited_for(quartet: WorkerGroup) -> None:
    call, _ = submitted(quartet, [""] * 4, steps=1)
    assert not quartet.interject(call, "another call", "pause", [0, 1])
    call.result()


@pytest.mark.parametrize(("how", "said"), [("raise", "expert 7 is missing"), ("kill", "killed ")])
def test_a_rank_that_fails_on_the_way_says_so(ray_cluster: Cluster, how: str, said: str) -> None:
    with WorkerGroup(ray_cluster, Light, 2) as group:
        call, heard = submitted(group, ["", how], steps=12)
        with pytest.raises(WorkerFailure, match=rf"Rank 1 .* in steps: .*{said}"):
            call.result()
        assert {rank for _, rank, *_ in heard} == {0, 1}
