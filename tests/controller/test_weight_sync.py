"""When receivers are asked what they need, and what travels then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.engine_work import MODELS
from quintet.cluster.cluster import Cluster
from quintet.cluster.group import WorkerGroup
from quintet.controller.replicas import RolloutReplicas
from quintet.controller.weight_check import Proof
from quintet.controller.weight_sync import WeightSync
from quintet.recipe import schema
from tests.controller.sync_workers import Serving, Taking
from tests.rollout.vllm.test_weights import weights_of

pytestmark = pytest.mark.slow

EVERYTHING = sum(t.nbytes for t in weights_of(0).values())


class Rollouts(RolloutReplicas):
    """Those of a run, which are there already, and none of which dies."""

    def __init__(self, *groups: WorkerGroup) -> None:
        self.groups, self._recipe = list(groups), schema.Recipe()


@pytest.fixture(scope="module")
def policy(ray_cluster: Cluster) -> Iterator[WorkerGroup]:
    with WorkerGroup(ray_cluster, Serving, 2, name="policy") as group:
        yield group


@pytest.fixture(scope="module")
def cut(ray_cluster: Cluster) -> Iterator[WorkerGroup]:
    """A rollout of two devices, which need a part each."""
    with WorkerGroup(ray_cluster, Taking, 1, name="rollout-0", tp=2) as group:
        yield group


@pytest.fixture(scope="module")
def whole(ray_cluster: Cluster) -> Iterator[WorkerGroup]:
    """A rollout that says each time that it needs whole tensors."""
    with WorkerGroup(ray_cluster, Taking, 1, name="rollout-1", tp=1) as group:
        yield group


@pytest.fixture(scope="module")
def proof(policy: WorkerGroup) -> Proof:
    """As long-lived as the ranks: these tell once which parts they hold."""
    return Proof(policy, recipe_of("separate"), MODELS["tiny"].shape, pytest.fail)


def recipe_of(placement: str) -> schema.Recipe:
    return schema.Recipe.model_validate(
        {"rollout": {"backend": "vllm", "placement": placement, "layout": {"tp": 2}}}
    )


def told(group: WorkerGroup) -> tuple[int, list[int]]:
    return group.one(Taking.told)()


def test_receivers_are_asked_once_more_when_they_know_what_they_need(
    policy: WorkerGroup, cut: WorkerGroup, whole: WorkerGroup, proof: Proof
) -> None:
    """Before the first sync and before the second; planned for anew only where that changes anything."""
    rollouts = Rollouts(cut, whole)
    sync = WeightSync(policy, rollouts, recipe_of("colocated"), proof)
    sync.bring()
    assert policy.all(Serving.planned)() == [1, 1]
    assert (told(cut), told(whole)) == ((1, [EVERYTHING] * 2), (1, [EVERYTHING]))
    for _ in range(2):
        sync.bring()
        assert policy.all(Serving.planned)() == [2, 2]
        assert [asked for asked, _ in map(told, (cut, whole))] == [2, 2]
        assert all(0.5 * EVERYTHING <= got < 0.8 * EVERYTHING for got in told(cut)[1])
        assert told(whole)[1] == [EVERYTHING]
    rollouts.groups[0] = None  # the one that knew its parts is gone; the other says what it said before
    for asked in (3, 4, 4):
        sync.bring()
        assert policy.all(Serving.planned)() == [3, 3]
        assert told(whole) == (asked, [EVERYTHING])


def test_separate_devices_get_parts_as_well(
    policy: WorkerGroup, cut: WorkerGroup, whole: WorkerGroup, proof: Proof
) -> None:
    rollouts = Rollouts(cut, whole)
    sync = WeightSync(policy, rollouts, recipe_of("separate"), proof)
    for _ in range(2):
        sync.bring()
        assert all(0.5 * EVERYTHING <= got < 0.8 * EVERYTHING for got in told(cut)[1])
        assert told(whole)[1] == [EVERYTHING]
