"""Waiting for several worker groups at once, and groups that sit beside others."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

import psutil
import pytest
import ray

from quintet.cluster.calls import outcomes, results
from quintet.cluster.cluster import Cluster
from quintet.cluster.environment import rank_environment, threads_per_rank
from quintet.cluster.group import WorkerGroup
from quintet.cluster.worker import Place
from quintet.errors import (
    QuintetError,
    RolloutMismatch,
    Stopped,
    SyncFailure,
    SyncMismatch,
    UserError,
    WorkerFailure,
)
from quintet.recipe.schema import Cluster as ClusterSettings
from tests.cluster.workers import Light
from tests.patience import BUSY


def one_beside(cluster: Cluster, quartet: WorkerGroup) -> WorkerGroup:
    """One rank beside two of the quartet."""
    beside = [quartet.locations[:2]]
    return WorkerGroup(
        cluster, Light, 1, name="rollout-1", named_in_messages=True, colocate_with=beside, mesh=(1, 1, 1)
    )


@pytest.fixture
def mortal(ray_cluster: Cluster, quartet: WorkerGroup) -> Iterator[WorkerGroup]:
    """One that a test may end."""
    with one_beside(ray_cluster, quartet) as group:
        yield group


@pytest.fixture(scope="module")
def lasting(ray_cluster: Cluster, quartet: WorkerGroup) -> Iterator[WorkerGroup]:
    """One for all tests that leave it as it is."""
    with one_beside(ray_cluster, quartet) as group:
        yield group


def test_what_a_signal_raises_ends_a_wait_as_itself(quartet: WorkerGroup) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Stopped("ended by SIGTERM")

    before = signal.signal(signal.SIGALRM, handle)
    call = quartet.all(Light.count).submit(1, 1.0)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Stopped, match="ended by SIGTERM"):
            results([call])
    finally:
        signal.signal(signal.SIGALRM, before)
    results([call])


@pytest.mark.slow
def test_patience_gives_every_group_its_outcome(mortal: WorkerGroup, quartet: WorkerGroup) -> None:
    died, told = outcomes([mortal.all(Light.fail).submit("kill", 0), quartet.all(Light.tell).submit(1)])
    assert isinstance(died, WorkerFailure)
    assert [args for _, args, _ in told] == [(1,)] * 4


@pytest.mark.parametrize(
    ("how", "kind", "code", "said"),
    [
        ("mismatch", SyncMismatch, 5, "rollout-1 rank 0: model.norm.weight differs"),
        ("disagree", RolloutMismatch, 6, "rollout-1 rank 0: the log-probs are apart"),
        (
            "sync",
            SyncFailure,
            3,
            "receiver rollout-1 rank 0 device 0: nothing came from the trainer within 1 s",
        ),
    ],
)
def test_what_a_rank_raises_on_purpose_stays_that(
    lasting: WorkerGroup, how: str, kind: type[QuintetError], code: int, said: str
) -> None:
    """One message, without a traceback, with its own exit code; and the rank can be asked again."""
    with pytest.raises(kind) as caught:
        lasting.all(Light.fail)(how, 0)
    assert (str(caught.value), caught.value.exit_code) == (said, code)
    assert lasting.all(Light.tell)()[0][0] == 0


def test_weights_that_stop_coming_are_the_echo_of_the_trainers_failure(
    lasting: WorkerGroup, quartet: WorkerGroup
) -> None:
    with pytest.raises(UserError, match=r"^model\.path"):
        results([lasting.all(Light.fail).submit("sync", 0), quartet.all(Light.fail).submit("user", 0)])
    sync = lasting.all(Light.fail).submit("sync", 0)
    sync.others = lambda: SyncFailure("the trainer says why")
    with pytest.raises(SyncFailure, match="the trainer says why"):
        sync.result()


@pytest.mark.slow
def test_who_was_given_up_is_not_waited_for(mortal: WorkerGroup) -> None:
    call = mortal.all(Light.sleep).submit()
    call.others = lambda: SyncFailure("it took nothing for 1 s")
    with pytest.raises(SyncFailure, match="it took nothing"):
        call.result()


def test_a_process_that_was_woken_and_is_stopped_again_has_its_time_anew(
    lasting: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody looked while it was at work."""
    said: list[str] = []
    monkeypatch.setattr(lasting.cluster, "say", said.append)
    monkeypatch.setattr(lasting.cluster.settings, "collective_timeout_s", 60.0)
    monkeypatch.setattr(lasting, "_on_nodes", lambda ranks, look: {0: "its process (1) is stopped"})
    assert lasting.stalled([0], "generate") == []
    monkeypatch.setattr(lasting.cluster.settings, "collective_timeout_s", 0.0)
    (gone,) = lasting.stalled([0], "generate")
    assert "for longer than 0 s" in gone.summary
    lasting.all(Light.tell)()
    monkeypatch.setattr(lasting.cluster.settings, "collective_timeout_s", 60.0)
    assert lasting.stalled([0], "generate") == []
    assert len(said) == 2


@pytest.mark.slow
def test_a_process_that_stays_stopped_is_told_of_and_then_given_up(
    mortal: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("quintet.cluster.calls.LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(mortal.cluster, "say", said.append)
    monkeypatch.setattr(mortal.cluster.settings, "collective_timeout_s", 1.0)
    with pytest.raises(WorkerFailure) as caught:
        mortal.all(Light.fail, phase="generate")("stop", 0)
    assert re.fullmatch(
        r"rollout-1 rank 0 failed in generate: its process \(\d+\) is stopped \(SIGSTOP\), for longer than 1 s "
        r"\(cluster\.collective_timeout_s\)",
        str(caught.value),
    )
    (warned,) = said
    assert warned.startswith("warning: rollout-1 rank 0, in generate: its process")
    pid = mortal.locations[0].pid
    mortal.close()
    deadline = time.monotonic() + 5 * BUSY
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "a stopped process was left behind"
        time.sleep(0.05)


def test_ranks_beside_others_are_on_their_node_with_their_devices(
    lasting: WorkerGroup, quartet: WorkerGroup
) -> None:
    (there,) = lasting.locations
    assert there.node_id == quartet.locations[0].node_id
    on_gpus = replace(there, gpus=(4, 5))
    place = Place(0, 1, 0, 1, "cuda:0", "here", 1, 60.0)
    found = rank_environment(place, on_gpus.gpus, True)
    assert found["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert found["NVIDIA_TF32_OVERRIDE"] == "0"  # what is fp32 is multiplied so
    on_cpu = rank_environment(replace(place, device="cpu"), (), True)
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == ""  # of what the node has none is seen


@pytest.mark.parametrize(("given", "threads"), [(None, 16), ("3", 3), ("4,2", 4), ("", 16)])
def test_ranks_share_the_cores_of_their_node_as_threads(
    monkeypatch: pytest.MonkeyPatch, given: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_per_rank(32, 2) == threads
    for wrong in ("0", "-1", "many", "2.5"):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        with pytest.raises(UserError, match=f"OMP_NUM_THREADS={wrong} is no number of threads"):
            threads_per_rank(32, 2)


def test_a_cluster_too_small_for_both_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 6.0})
    cluster = Cluster(ClusterSettings(ranks=4))
    cluster.device = "cuda"
    cluster.check_devices({"cluster.ranks": 4, "rollout.ranks": 2}, "or share")
    with pytest.raises(UserError) as caught:
        cluster.check_devices({"cluster.ranks": 4, "rollout.ranks": 4}, "or share")
    assert str(caught.value) == (
        "cluster.ranks=4 and rollout.ranks=4 need 8 GPUs, and the cluster has 6. Lower one of them, or share."
    )


def test_a_death_is_told_by_the_groups_name_and_ends_the_wait(
    ray_cluster: Cluster, mortal: WorkerGroup, quartet: WorkerGroup
) -> None:
    """Others that are still at work are not waited for."""
    with one_beside(ray_cluster, quartet) as busy:
        began = time.monotonic()
        with pytest.raises(WorkerFailure, match=r"^rollout-1 rank 0 died in generate: (killed|ended)"):
            results(
                [
                    busy.all(Light.count).submit(1, 30.0),
                    mortal.all(Light.fail, phase="generate").submit("kill", 0),
                ]
            )
        assert time.monotonic() - began < 5 * BUSY
