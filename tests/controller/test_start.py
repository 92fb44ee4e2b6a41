"""Copies of the rollout start together: one that cannot ends the others' start."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from quintet.cluster.cluster import Cluster
from quintet.cluster.group import WorkerGroup
from quintet.cluster.progress import KEY_VARIABLE
from quintet.cluster.worker import Place
from quintet.controller import replicas
from quintet.controller.rollouts import Call
from quintet.errors import Stopped, UserError
from quintet.recipe.schema import Cluster as ClusterSettings
from quintet.recipe.schema import Recipe, Rollout
from quintet.rollout.base import Sampling
from tests.cluster.workers import Light
from tests.patience import BUSY


class Choosy(Light):
    """rollout-1 refuses its options once the others have begun; those take their time."""

    def __init__(self, place: Place, recipe: Recipe, model_dir: Path) -> None:
        super().__init__(place)
        self.begun = model_dir / str(os.getpid())

    def setup(self) -> None:
        self.begun.touch()
        if "rollout-1" in os.environ[KEY_VARIABLE]:
            while len(list(self.begun.parent.iterdir())) < 2:
                time.sleep(0.05)
            raise UserError("rollout.vllm.seed is decided by quintet")
        time.sleep(1000)


class Quiet(Light):
    """Starts, and does nothing."""

    def __init__(self, place: Place, recipe: Recipe, model_dir: Path) -> None:
        super().__init__(place)


def left(pids: list[int]) -> list[int]:
    """Those that still run."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


@pytest.mark.slow
def test_one_that_cannot_start_ends_the_start_of_the_others(
    ray_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replicas_of(Choosy, ray_cluster, tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"^rollout\.vllm\.seed is decided by quintet$"):
        made.start()
    pids = [int(one.name) for one in tmp_path.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5 * BUSY
    while left(pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert made.missing()


@pytest.mark.slow
def test_one_that_dies_before_it_is_first_asked_to_generate_is_missing(
    ray_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replicas_of(Quiet, ray_cluster, tmp_path, monkeypatch)
    made.start()
    group = made.groups[1]
    assert group is not None
    psutil.Process(int(group.locations[0].pid)).kill()
    call = Call({1: []}, Sampling(), "call", [], lambda: None, lambda *group: None)
    assert made.generate(call) == []
    assert [one is None for one in made.groups] == [False, True]
    made.groups[0].close()  # type: ignore[union-attr]


def test_a_stop_waits_for_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def start_one(number: int, given_up: threading.Event) -> UserError:
        given_up.wait(20 * BUSY)
        go_on.wait(5 * BUSY)
        ended.set()
        return UserError("the start was given up")

    def stop(starting: object) -> None:
        raise Stopped("ended by SIGTERM")

    recipe, nothing = Recipe(rollout=Rollout(own_processes=True)), SimpleNamespace()
    made = replicas.RolloutReplicas(nothing, recipe, tmp_path, policy_of(), nothing)  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_start_one", start_one)
    monkeypatch.setattr(replicas, "as_completed", stop)
    with pytest.raises(Stopped, match="ended by SIGTERM"):
        made.start()
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(5 * BUSY)


def replicas_of(
    worker: type[Light], cluster: Cluster, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> replicas.RolloutReplicas:
    """Two copies of a rollout whose ranks are such workers."""

    def group(cluster: Cluster, named: str, ranks: int, **rest: Any) -> WorkerGroup:
        return WorkerGroup(cluster, worker, ranks, **rest)

    monkeypatch.setattr(replicas, "WorkerGroup", group)
    recipe = Recipe(cluster=ClusterSettings(ranks=2), rollout=Rollout(own_processes=True, restart=True))
    nodes = [SimpleNamespace(node_id=ray_cluster_node(), gpus=())] * 2
    return replicas.RolloutReplicas(cluster, recipe, model_dir, policy_of(nodes), SimpleNamespace())  # type: ignore[arg-type]


def policy_of(locations: list[Any] | None = None) -> Any:
    """The trainer's ranks, which have connected at once."""
    done = SimpleNamespace(submit=lambda: SimpleNamespace(result=lambda: None))
    return SimpleNamespace(locations=locations, all=lambda verb, phase: done)


def ray_cluster_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())
