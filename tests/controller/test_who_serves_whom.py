"""Which of the trainer's ranks serves which receiver, and when that is planned anew. No process is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quintet.controller.weight_sync import WeightSync
from quintet.recipe.schema import Cluster, Recipe, Rollout, RolloutLayout
from quintet.rollout.base import WANTED, Wanted
from tests.cluster.asked import AskedRanks

PARTS = WANTED.dump([Wanted("model.norm.weight", ((0, 4),))])


class Asked(AskedRanks):
    """Trainer, rollouts and proof of two copies of one device each; lost: whether the second dies of the next transfer."""

    n_ranks = 2

    def __init__(self) -> None:
        self.groups: list[Any] = [AskedRanks(), AskedRanks()]
        self.wanted: Any = None
        self.plans: list[list[list[str]]] = []
        self.proved = 0
        self.lost = False

    def answer(self, name: str, rank: int, *args: Any, **kwargs: Any) -> Any:
        if name == "serve":
            return SimpleNamespace(bytes=0)
        if name == "plan_sync":
            (specs,) = args
            if rank == 0:
                self.plans.append([])
            self.plans[-1].append([spec.id for spec in specs])
            return [SimpleNamespace(receiver=spec.id) for spec in specs]
        return None

    def ask(self, verb: Any, phase: str) -> Any:
        there = [number for number, group in enumerate(self.groups) if group is not None]
        return lambda: {number: [[self.wanted]] for number in there}

    def collect_survivors(self, calls: Any, beside: Any = None, watch: Any = None) -> dict[int, Any]:
        if self.lost:
            self.groups[1] = None
        return {}

    def of(self, copies: Any) -> dict[str, float]:
        self.proved += 1
        return {}


def sync(asked: Asked, **rollout: Any) -> WeightSync:
    recipe = Recipe(cluster=Cluster(ranks=2), rollout=Rollout(layout=RolloutLayout(), **rollout))
    return WeightSync(asked, asked, recipe, asked)  # type: ignore[arg-type]


IDS = [f"rollout-{number} rank 0 device 0" for number in range(2)]


def test_a_colocated_receiver_is_served_by_the_rank_on_its_device() -> None:
    asked = Asked()
    asked.wanted = PARTS
    one = sync(asked, own_processes=True)
    one.bring()
    one.bring()
    assert asked.plans == [[[IDS[0]], [IDS[1]]]]  # and stays planned
    asked.groups[1] = AskedRanks()  # made anew
    one.bring()
    assert len(asked.plans) == 2


@pytest.mark.parametrize("wanted", [None, PARTS])
def test_separate_receivers_that_want_the_same_are_served_together(wanted: Any) -> None:
    asked = Asked()
    asked.wanted = wanted
    sync(asked, placement="separate", ranks=2).bring()
    assert asked.plans == [[IDS, []]]


def test_parts_that_are_known_after_a_first_load_are_planned_for() -> None:
    asked = Asked()
    one = sync(asked, backend="vllm")
    one.bring()
    asked.wanted = PARTS
    one.bring()
    one.bring()
    assert len(asked.plans) == 2


def test_nothing_is_proved_while_a_copy_is_missing() -> None:
    asked = Asked()
    asked.wanted = PARTS
    one = sync(asked, own_processes=True)
    one.bring()
    assert asked.proved == 1
    asked.lost = True
    one.bring()
    assert asked.proved == 1
