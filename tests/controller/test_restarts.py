"""Copies of the rollout that die: how often each is made anew, and what ends the run. No process is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.cluster.verbs import Asked
from quintet.controller import replicas as module
from quintet.controller.replicas import RESTARTS_IN_A_ROW, RolloutReplicas
from quintet.controller.rollouts import Call
from quintet.controller.verbs import Backend
from quintet.errors import QuintetError, RayFailure, UserError, WorkerFailure
from quintet.recipe.schema import Cluster, Recipe, RolloutLayout
from quintet.recipe.schema import Rollout as Settings
from quintet.train.session import _what_then
from tests.cluster.asked import AskedRanks, Named


class Group(AskedRanks):
    """A copy that answers nothing itself: `outcomes` does."""

    def submit(self, asked: Asked) -> Any:
        return Named(asked.verb.__name__)

    def close(self) -> None:
        pass


def replicas(said: list[str], answers: list[Any], monkeypatch: pytest.MonkeyPatch, **rollout: Any) -> Any:
    """Two copies, whose calls come to what `answers` has next: a list of (copies', trainer's) values or errors."""
    monkeypatch.setattr(module, "outcomes", lambda calls, watch: answers.pop(0))
    cluster: Any = SimpleNamespace(say=said.append)
    recipe = Recipe(cluster=Cluster(ranks=2), rollout=Settings(own_processes=True, restart=True, **rollout))
    policy: Any = SimpleNamespace(n_ranks=2)
    made = RolloutReplicas(cluster, recipe, Path("model"), policy, SimpleNamespace(sequences=[[1, 2]]))  # type: ignore[arg-type]
    made.groups = [Group(), Group()]  # type: ignore[list-item]
    return made


def died() -> QuintetError:
    return WorkerFailure("rollout-1 rank 0 died in generate")


MADE = (None, "spare")


def test_a_copy_is_made_anew_so_often_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    said, answers = list[str](), list[Any]()
    one = replicas(said, answers, monkeypatch)
    lost: list[Any] = [[MADE], died()]

    def generate() -> Any:
        one.groups = [Group(), Group()]
        sampling: Any = None
        return one.generate(Call({0: [], 1: []}, sampling, "call", [], lambda: None, lambda *told: None))

    answers += [lost] * RESTARTS_IN_A_ROW
    for number in range(1, RESTARTS_IN_A_ROW + 1):
        assert generate() == [0]
        assert one.missing()
        assert said[-1].endswith(f"It is started anew ({number} of {RESTARTS_IN_A_ROW})")
    answers += [[[MADE], [MADE]], lost]  # what has generated begins to count again
    assert generate() == [0, 1]
    assert generate() == [0]
    answers += [lost] * RESTARTS_IN_A_ROW
    for _ in range(RESTARTS_IN_A_ROW - 1):
        generate()
    with pytest.raises(
        WorkerFailure, match=rf"rollout-1 was started anew {RESTARTS_IN_A_ROW} times in a row"
    ):
        generate()


def test_the_death_of_ray_is_no_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    one = replicas(said, [], monkeypatch)
    with pytest.raises(RayFailure):
        one._lose(0, RayFailure("Ray's raylet died"))
    assert said == []


def test_what_is_no_death_of_a_rollout_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    one = replicas(said, [[["right"], UserError("a prompt is too long")]], monkeypatch)
    with pytest.raises(UserError, match="too long"):
        one.ask(Backend.score, phase="sync")([])
    one = replicas(said, [[["right"], ["right"], WorkerFailure("rank 0 died")]], monkeypatch)
    trainer: Any = "serve"
    with pytest.raises(WorkerFailure, match=r"^rank 0 died"):
        one.collect_survivors({0: "take", 1: "take"}, beside=trainer)
    assert said == []


def test_nothing_is_probed_while_a_copy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may hold half of the new weights: all of them get these again with it."""
    one = replicas([], [], monkeypatch)
    one.groups[1] = None
    assert one.probe() == {}


def test_the_devices_of_one_process_are_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replicas([], [], monkeypatch, layout=RolloutLayout(tp=2))
    node = [SimpleNamespace(node_id=name) for name in "aab"]
    one._check_node(0, [node[:2]])
    one._check_node(0, [[place] for place in node])  # a process a device
    with pytest.raises(UserError, match=r"rollout-0: .* are to be on one node"):
        one._check_node(0, [node])


def test_a_restart_is_advised_against_deaths_alone() -> None:
    recipe = Recipe(rollout=Settings(own_processes=True))
    dead = WorkerFailure("rollout-0 rank 0 died in generate: killed")
    of_vllm = WorkerFailure("rollout-0 rank 0 failed in wake: vLLM: VLLM::EngineCore (process 7) died")
    for death in (dead, of_vllm):
        assert "With rollout.restart=true it would be started anew" in _what_then(recipe, death, False)
    wrong = WorkerFailure("rollout-0 rank 0 failed in generate: RuntimeError: no kernel", traceback="…")
    assert _what_then(recipe, wrong, False) == ""
    assert _what_then(Recipe(rollout=Settings(own_processes=True, restart=True)), dead, False) == ""
