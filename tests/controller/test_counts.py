"""What rollouts count becomes metrics: shares, where there is something to share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quintet.controller.controller import Controller
from quintet.controller.dealing import SlotTime
from quintet.controller.replicas import RolloutReplicas


def counted(**counts: float) -> dict[str, float]:
    controller: Any = SimpleNamespace(
        _handover=True, rollouts=SimpleNamespace(counts=lambda: counts), _slot_times=[]
    )
    return Controller.counted(controller)


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ({}, {}),
        ({"prefix_cache_queries": 0.0, "draft_tokens": 0.0}, {}),
        ({"prefix_cache_queries": 8.0, "prefix_cache_hits": 2.0}, {"rollout/prefix_cache_fraction": 0.25}),
        (
            {"draft_tokens": 10.0, "accepted_tokens": 4.0, "drafts": 5.0},
            {"rollout/draft_tokens": 10.0, "rollout/accepted_fraction": 0.4, "rollout/accepted_length": 1.8},
        ),
        (
            {
                "draft_tokens": 10.0,
                "accepted_tokens": 4.0,
                "drafts": 5.0,
                "accepted_at_1": 3.0,
                "accepted_at_2": 1.0,
            },
            {
                "rollout/draft_tokens": 10.0,
                "rollout/accepted_fraction": 0.4,
                "rollout/accepted_length": 1.8,
                "rollout/accepted_at_1": 0.6,
                "rollout/accepted_at_2": 0.2,
            },
        ),
    ],
)
def test_shares(counts, told):
    assert counted(**counts) == told


def test_a_command_without_rollouts_counts_nothing():
    controller: Any = SimpleNamespace(_handover=None, _slot_times=[])
    assert Controller.counted(controller) == {}


def test_the_idle_share_is_of_the_calls_since_the_last_time():
    controller: Any = SimpleNamespace(_handover=None, _slot_times=[SlotTime(1.0, 3.0), SlotTime(2.0, 9.0)])
    assert Controller.counted(controller) == {"rollout/tail_idle_fraction": 0.25}
    assert Controller.counted(controller) == {}


def test_copies_are_added_up():
    replicas: Any = SimpleNamespace(
        ask=lambda *a, **k: lambda: {0: [{"drafts": 2.0}], 2: [{"drafts": 3.0}], 3: [{}]}
    )
    assert RolloutReplicas.counts(replicas) == {"drafts": 5.0}
