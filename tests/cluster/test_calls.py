"""Waiting for several worker groups at once, and groups that sit beside others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray

from quintet.cluster.calls import outcomes, results
from quintet.cluster.cluster import Cluster
from quintet.cluster.group import WorkerGroup, _environment
from quintet.cluster.worker import Place
from quintet.errors import SyncMismatch, UserError, WorkerFailure
from quintet.recipe.schema import Cluster as ClusterSettings
from tests.cluster.workers import Light


@pytest.fixture
def mortal(ray_cluster: Cluster, quartet: WorkerGroup) -> Iterator[WorkerGroup]:
    """One rank that a test may end, beside two of the quartet."""
    beside = [quartet.locations[:2]]
    with WorkerGroup(
        ray_cluster, Light, 1, name="rollout-1", told=True, beside=beside, mesh=(1, 1, 1)
    ) as group:
        yield group


def test_a_death_is_told_by_the_groups_name_and_ends_the_wait(
    mortal: WorkerGroup, quartet: WorkerGroup
) -> None:
    """Others that are still at work are not waited for."""
    began = time.monotonic()
    with pytest.raises(WorkerFailure, match=r"^rollout-1 rank 0 died in generate: (killed|ended)"):
        results(
            [
                quartet.submit("count", 1, 30.0),
                mortal.submit("fail", "kill", 0, phase="generate"),
            ]
        )
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_patience_gives_every_group_its_outcome(mortal: WorkerGroup, quartet: WorkerGroup) -> None:
    died, told = outcomes([mortal.submit("fail", "kill", 0), quartet.submit("tell", 1)])
    assert isinstance(died, WorkerFailure)
    assert [args for _, args, _ in told] == [(1,)] * 4


def test_a_mismatch_on_a_rank_stays_one(mortal: WorkerGroup) -> None:
    with pytest.raises(SyncMismatch, match=r"^model\.norm\.weight differs$"):
        mortal.call("fail", "mismatch", 0)
    assert mortal.call("tell")[0][0] == 0


def test_ranks_beside_others_are_on_their_node_with_their_devices(
    mortal: WorkerGroup, quartet: WorkerGroup
) -> None:
    (there,) = mortal.locations
    assert there.node_id == quartet.locations[0].node_id
    on_gpus = replace(there, gpus=(4, 5))
    place = Place(0, 1, 0, 1, "cuda:0", "here", 1, 60.0)
    assert _environment(place, on_gpus, True)["CUDA_VISIBLE_DEVICES"] == "4,5"


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
