"""Samples whose keeper died come from the copy that it left, also once another process has taken its place."""

from __future__ import annotations

import threading
from typing import Any

from quintet.cluster.verbs import Asked
from quintet.controller.replicas import RolloutReplicas
from quintet.controller.rollouts import Call
from tests.cluster.asked import AskedRanks, Named


class Group(AskedRanks):
    """A copy of the rollout that says who was asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, asked: Asked) -> Any:
        return Named(f"{self.name} {asked.verb.__name__}")


class Policy(AskedRanks):
    """The trainer's ranks, which give the one copy back."""

    def answer(self, name: str, rank: int, *args: Any, **kwargs: Any) -> Any:
        return None, args[0]["b"][0]


def _nobody(rollout: int, at: int, group: list[Any]) -> None:
    """Hears of no group."""


def test_a_copy_made_anew_is_not_asked_for_what_another_generated() -> None:
    replicas: Any = object.__new__(RolloutReplicas)
    first, second = Group("first"), Group("second")
    replicas.groups = [first, second]
    replicas._kept, replicas._restarts = {}, [0, 0]
    told = {
        "rollout.generate": lambda who: [(None, f"spare of {who}")],
        "rollout.slice_samples": lambda who: [(None, who)],
    }

    def collect_survivors(calls: dict[int, str], watch: Any = None) -> dict[int, Any]:
        return {number: told[call.split()[1]](call.split()[0]) for number, call in calls.items()}

    replicas.collect_survivors = collect_survivors
    replicas._policy, replicas._speaking = Policy(), threading.Lock()
    sampling: Any = None
    replicas.generate(Call({0: [], 1: []}, sampling, "a", [], lambda: None, _nobody))
    replicas.generate(Call({0: [], 1: []}, sampling, "b", ["a"], lambda: None, _nobody))
    assert replicas._kept.keys() == {"b"}
    wanted = [[[("b", 0)]], [[("b", 1)]]]
    assert replicas.slice_samples(wanted, [None]) == [["first"], ["second"]]

    replicas.groups[0] = Group("first-again")
    assert replicas.slice_samples(wanted, [None]) == [["spare of first"], ["second"]]
    replicas.groups[1] = None
    assert replicas.slice_samples(wanted, [None]) == [["spare of first"], ["spare of second"]]
