"""What is changed of vLLM's scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def test_a_token_is_thrown_away_where_one_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four requests two are drawing; vLLM's own takes all from those that run, and would throw a token of each away."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from quintet.rollout.vllm.scheduler import WholeScheduler

    asked = []

    def its(self: Any, reset_running_requests: bool, reset_connector: bool) -> bool:
        asked.append((reset_running_requests, reset_connector))
        while reset_running_requests and self.running:
            request = self.running.pop()
            request.num_output_placeholders, request.discard_latest_async_tokens = 0, True
        return True

    monkeypatch.setattr(AsyncScheduler, "reset_prefix_cache", its)
    scheduler: Any = object.__new__(WholeScheduler)
    requests = [
        SimpleNamespace(num_output_placeholders=drawing, discard_latest_async_tokens=False)
        for drawing in (1, 0, 2, 0)
    ]
    scheduler.running = list(requests)
    assert scheduler.reset_prefix_cache()
    assert not any(one.discard_latest_async_tokens for one in requests)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert asked == [(False, False), (True, False)]
    assert [one.discard_latest_async_tokens for one in requests] == [True, False, True, False]


def test_drafts_of_a_step_that_is_thrown_away_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three requests one was emptied while its step was under way, and one is gone."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from quintet.rollout.vllm.scheduler import WholeScheduler

    def its(self: Any, step: Any, made: Any) -> tuple[dict[str, list[int]], Any]:
        return step.scheduled_spec_decode_tokens, made

    monkeypatch.setattr(AsyncScheduler, "update_from_output", its)
    scheduler: Any = object.__new__(WholeScheduler)
    scheduler.requests = {
        name: SimpleNamespace(discard_latest_async_tokens=emptied)
        for name, emptied in (("goes on", False), ("emptied", True))
    }
    step = SimpleNamespace(scheduled_spec_decode_tokens={"goes on": [1], "emptied": [2], "gone": [3]})
    assert scheduler.update_from_output(step, "made") == ({"goes on": [1], "gone": [3]}, "made")
