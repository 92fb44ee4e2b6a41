"""Dead, failing and hanging ranks: one message that names the cause, in time."""

from __future__ import annotations

import os
import threading
import time

import pytest

from quintet.cluster import group as group_module
from quintet.cluster.cluster import Cluster
from quintet.cluster.failures import Failure, explain, root_cause
from quintet.cluster.group import WorkerGroup
from quintet.cluster.process_probe import Location, Report, tidy
from quintet.cluster.rank_actor import RankActor
from quintet.errors import OutOfMemory, UserError, WorkerFailure
from quintet.recipe.schema import Cluster as ClusterSettings
from tests.cluster.workers import NO_MEMORY, Collective, Light, Stillborn
from tests.patience import BUSY


def test_an_exception_is_told_at_once_and_without_noise(ray_cluster: Cluster) -> None:
    with WorkerGroup(ray_cluster, Collective, 2) as group:
        began = time.monotonic()
        with pytest.raises(WorkerFailure) as caught:
            group.all(Collective.meet, phase="train")(["come", "raise"])
        # Rank 0 waits in the all_reduce until the time limit; nobody waits for it.
        assert time.monotonic() - began < 5 * BUSY
        with pytest.raises(WorkerFailure, match="Rank 1 failed in train"):
            group.all(Collective.ping)()
    error = caught.value
    assert (error.rank, error.phase) == (1, "train")
    assert error.message.startswith("Rank 1 failed in train: LookupError: expert 7 is missing")
    assert error.traceback is not None
    assert "in inner_fail" in error.traceback
    assert "ray" not in error.traceback.replace("array", "")
    assert "seat.py" not in error.traceback


@pytest.mark.parametrize("how", NO_MEMORY)
def test_a_rank_without_memory_is_one_message(ray_cluster: Cluster, how: str) -> None:
    """Whoever says so: it is no echo of another rank's end, and what the others say is."""
    with WorkerGroup(ray_cluster, Collective, 2) as group, pytest.raises(OutOfMemory) as caught:
        group.all(Collective.meet, phase="train")(["come", how])
    said = {
        "torch's memory": "2.50 GiB more were asked for",
        "NCCL's memory": "Failed to CUDA calloc async 608 bytes: Cuda failure 2 'out of memory'",
        "a host's memory": "8 bytes more were asked for",
    }[how]
    assert str(caught.value) == (
        f"Rank 1: out of memory in train, at micro-batch 1 of 3 ({said}).\n"
        "While it trains the fullest rank needs about 3.5 GiB by the memory formula (parameters 3.0, other 0.5), and a rollout on top.\n"
        "What needs less, by the same formula: engine.recompute=full (1.0 GiB)."
    )
    assert caught.value.exit_code == 3


def test_a_killed_rank_is_named_though_its_peers_fail_too(ray_cluster: Cluster) -> None:
    with WorkerGroup(ray_cluster, Collective, 2) as group, pytest.raises(WorkerFailure) as caught:
        group.all(Collective.meet, phase="train")(["come", "kill"])
    assert caught.value.rank == 1
    assert caught.value.message.startswith("Rank 1 died in train: ")
    assert "kill" in caught.value.message
    assert "last words" in str(caught.value)


def test_other_ends(ray_cluster: Cluster) -> None:
    with WorkerGroup(ray_cluster, Light, 3) as group:
        with pytest.raises(WorkerFailure, match=r"Rank 2 failed in fail: it called sys.exit\(3\)"):
            group.all(Light.fail)("sys.exit", 2)
        group._broken = None
        with pytest.raises(UserError, match=r"^model.path: no such directory$"):
            group.all(Light.fail)("user", 1)
        with pytest.raises(WorkerFailure) as caught:
            group.all(Light.fail)("engine", 1)
        assert str(caught.value) == "Rank 1 failed in fail: vLLM: VLLM::Worker_TP1 (process 7) died"
        group._broken = None
        with pytest.raises(WorkerFailure, match=r"Rank 1 died in fail: (.*exit code 7|ended without a word)"):
            group.all(Light.fail)("os._exit", 1)
        group._broken = None
        with pytest.raises(
            WorkerFailure, match=r"(?s)Rank 0 died in fail: .*(SIGSEGV|Segmentation).*inner_fail"
        ):
            group.one(Light.fail)("segfault", 0)


@pytest.mark.parametrize(
    ("how", "text"), [("raise", "failed in setup: LookupError"), ("kill", "died in setup: ")]
)
def test_a_rank_that_fails_to_start(ray_cluster: Cluster, how: str, text: str) -> None:
    with pytest.raises(WorkerFailure, match=f"^Rank 1 {text}"):
        WorkerGroup(ray_cluster, Stillborn, 2, how=how)


@pytest.mark.parametrize("how", NO_MEMORY)
def test_a_rank_without_memory_in_setup_is_one_message(ray_cluster: Cluster, how: str) -> None:
    with pytest.raises(OutOfMemory, match=r"^Rank 1: out of memory in setup \(.*\)\.$"):
        WorkerGroup(ray_cluster, Stillborn, 2, how=how)


@pytest.mark.parametrize("when", ["locate", "listen"])
def test_a_process_that_ends_before_it_is_a_rank(
    ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def ends(self: RankActor, *_: object) -> None:
        os._exit(7)

    monkeypatch.setattr(group_module, "RankActor", type("Mortal", (RankActor,), {when: ends}))
    with pytest.raises(
        WorkerFailure, match="rollout-1: a process ended while it started: The actor died"
    ) as caught:
        WorkerGroup(ray_cluster, Light, 1, name="rollout-1", named_in_messages=True)
    assert caught.value.phase == "start"
    assert "\n" not in str(caught.value)


def test_one_beside_ranks_whose_node_is_gone_does_not_start(ray_cluster: Cluster) -> None:
    gone = Location("e" * 56, "127.0.0.1", (), 1, 1, 0.0, None)
    with pytest.raises(
        WorkerFailure, match="rollout-1: a process did not start: The actor is not schedulable"
    ):
        WorkerGroup(ray_cluster, Light, 1, name="rollout-1", named_in_messages=True, colocate_with=[[gone]])


def test_a_start_that_is_given_up_waits_for_no_process(
    ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(self: RankActor) -> None:
        time.sleep(20 * BUSY)

    monkeypatch.setattr(group_module, "RankActor", type("Slow", (RankActor,), {"locate": waits}))
    given_up, began = threading.Event(), time.monotonic()
    threading.Timer(0.2, given_up.set).start()
    with pytest.raises(WorkerFailure, match="the start of rollout-1 was given up"):
        WorkerGroup(ray_cluster, Light, 1, name="rollout-1", cancel=given_up)
    assert time.monotonic() - began < 10 * BUSY


def test_last_words_are_not_of_an_earlier_life(ray_cluster: Cluster) -> None:
    def end(how: str) -> str:
        with (
            WorkerGroup(ray_cluster, Light, 1, name="revenant") as group,
            pytest.raises(WorkerFailure, match="Rank 0 died in fail") as caught,
        ):
            group.all(Light.fail)(how, 0)
        return str(caught.value)

    assert "last words" in end("kill")
    assert "last words" not in end("os._exit")


@pytest.mark.slow
def test_a_hang_shows_who_waits_and_who_never_came(ray_cluster: Cluster) -> None:
    settings = ClusterSettings(ranks=4, device="cpu", collective_timeout_s=2)
    with Cluster(settings) as cluster:
        group = WorkerGroup(cluster, Collective, 4)
        began = time.monotonic()
        with pytest.raises(WorkerFailure) as caught:
            group.all(Collective.meet, phase="train")(["come", "sleep", "hold the lock", "stop"])
        assert time.monotonic() - began < 2 + 5 * BUSY
    error = caught.value
    assert error.rank is None
    assert error.message.startswith(
        "A collective waited longer than 2 s (cluster.collective_timeout_s) in train."
    )
    assert "Waiting in it: rank 0. Never came: ranks 1, 2, 3." in error.message
    assert error.message.endswith("\nAt micro-batch 2 of 3: rank 0.\nAt micro-batch 1 of 3: ranks 1, 2, 3.")
    assert "in total" in error.stacks[0]
    assert "all_reduce" in error.stacks[0]
    assert "in oversleep" in error.stacks[1]
    assert "in hold_the_lock" in error.stacks[2]
    assert "no answer: its process is stopped" in error.stacks[3]
    assert "ray/" not in str(error)


def test_a_rank_that_returned_without_entering_is_named(ray_cluster: Cluster) -> None:
    reports = {0: Report("", 'main thread:\n  File "torch/distributed/x.py", line 1 in all_reduce', "")}
    late = Failure(2, "RuntimeError: Timed out waiting 2000ms", "trace", communication=True, timed_out=True)
    error = explain([late], phase="train", timeout_s=2, reports=reports, returned=[1])
    assert "Waiting in it: ranks 0, 2. Never came: rank 1." in str(error)
    assert "it had returned from train" in str(error)


def test_inspect_answers_while_ranks_are_busy(quartet: WorkerGroup) -> None:
    assert {report.stacks for report in quartet.inspect().values()} == {
        "main thread: idle, waiting for the next call"
    }


@pytest.mark.parametrize(
    ("text", "communication", "timed_out"),
    [
        (
            "[/p/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation",
            True,
            True,
        ),
        ("[/p/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:123", True, False),
        ("shape mismatch: gloom is not a backend", False, False),
    ],
)
def test_what_counts_as_communication(text: str, communication: bool, timed_out: bool) -> None:
    failure = Failure.of_exception(0, RuntimeError(text), __file__)
    assert (failure.communication, failure.timed_out) == (communication, timed_out)


def test_the_cause_is_the_first_that_is_no_echo() -> None:
    echo = Failure(0, "Connection closed", communication=True)
    late = Failure(3, "Timed out", communication=True, timed_out=True)
    bug, death = Failure(1, "KeyError"), Failure(2, "killed", died=True)
    assert root_cause([echo, bug, death]) is bug
    assert root_cause([late, death]) is death
    assert root_cause([echo, late]) is None
    assert root_cause([echo]) is echo


def test_tidy_keeps_the_worker_and_drops_ray() -> None:
    dump = """Thread 0x00007f01 (most recent call first):
  File "/v/site-packages/ray/_private/worker.py", line 10 in poll
  File "/lib/python3.11/threading.py", line 5 in run

Current thread 0x00007f00 (most recent call first):
  File "/x/tests/model.py", line 3 in oversleep
  File "/x/quintet/cluster/rank_actor.py", line 90 in call
  File "/v/site-packages/ray/_private/workers/default_worker.py", line 300 in <module>
"""
    assert tidy(dump) == (
        'main thread (most recent call first):\n  File "/x/tests/model.py", line 3 in oversleep'
    )
