"""When vLLM's synchronous engine tells answers. A stand-in for vLLM, which is not installed here: the real one is in test_offline.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.rollout.external_engine import Job
from quintet.rollout.vllm import compat, offline
from quintet.rollout.vllm.offline import OfflineEngine

JOBS = [Job([1], {}, name=name) for name in "abc"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[str]], OfflineEngine]:
    """What makes an engine of the requests that end in each of its steps, by name."""

    def add(self: OfflineEngine, jobs: Iterable[Job]) -> None:
        self._under_way.update(job.name for job in jobs)

    def make(ending: Iterable[str]) -> OfflineEngine:
        steps = iter(ending)

        def step() -> list[Any]:
            made.append("step")
            return [SimpleNamespace(finished=True, request_id=name) for name in next(steps)]

        made: list[str] = []
        monkeypatch.setattr(
            compat,
            "make_offline",
            lambda *_, **__: SimpleNamespace(step=step, abort_request=lambda names: None),
        )
        monkeypatch.setattr(compat, "StepCounts", lambda engine: None)
        monkeypatch.setattr(compat, "settle", lambda engine: made.append("settle"))
        monkeypatch.setattr(offline, "answer", lambda output: made.append(output.request_id))
        monkeypatch.setattr(OfflineEngine, "_add", add)
        engine = OfflineEngine({"tensor_parallel_size": 1, "pipeline_parallel_size": 1})
        engine.made = made  # type: ignore[attr-defined]
        return engine

    return make


def test_an_answer_is_told_when_the_next_step_is_under_way(engine: Any) -> None:
    """Its log-probs come to the host meanwhile. The last have no next step: they are told at once."""
    one = engine(["", "b", "", "ac"])
    told = [(list(together), one.made.count("step")) for together in one.run(JOBS)]
    assert told == [([1], 3), ([0, 2], 4)]
    assert one.made[-1] == "settle"


def test_what_is_late_is_told_although_a_pause_follows(engine: Any) -> None:
    one = engine(["b", "", "ac"])
    found = one.run(JOBS)
    end = one._engine.step

    def step_and_pause() -> list[Any]:
        found = end()
        one._paused = bool(one.made.count("step") == 1)
        return found

    one._engine.step = step_and_pause
    one._turn.wait = lambda: pytest.fail("it waits with an answer in hand")
    assert list(next(found)) == [1]
    assert one.made.count("step") == 1
    one._paused = False
    assert [sorted(together) for together in found] == [[0, 2]]
