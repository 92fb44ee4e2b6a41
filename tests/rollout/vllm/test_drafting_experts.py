"""A model whose layer for multi-token prediction has experts drafts for itself in vLLM as MiMo does (test_drafting.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quintet.rollout.base import Request, Sampling
from tests.rollout.prompts import PROMPTS
from tests.rollout.vllm import glm4_moe
from tests.rollout.vllm.conftest import DEVICE
from tests.rollout.vllm.test_update import Source, sync
from tests.rollout.vllm.test_worker import differing

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

GREEDY = Sampling(temperature=0, max_response_tokens=16)


def accepted(rollout: Any, seed: int) -> float:
    """The share of drafted tokens that is accepted in greedy responses, which are those without drafts."""
    rollout.metrics()
    rows = rollout.generate([Request(p) for p in PROMPTS], GREEDY)
    if DEVICE == "cpu":  # in bf16, tokens that are nearly as likely change places
        assert [s.response_ids for (s,) in rows] == glm4_moe.greedy(16, seed)
    counts = rollout.metrics()
    return counts["accepted_tokens"] / counts["draft_tokens"]


def test_a_layer_with_experts_drafts_and_follows_the_weights(start: Any, tmp_path: Path) -> None:
    rollout = start("glm4_moe", glm4_moe.save(tmp_path), empty=True, draft_tokens=1)
    sync(rollout, Source(glm4_moe.tensors(0)))
    before = accepted(rollout, 0)
    assert before > 0.3
    for seed in (1, 0):
        named = glm4_moe.tensors(seed)
        sync(rollout, Source(named))
        assert differing(rollout, named) == []
        assert accepted(rollout, seed) > 0.3
    assert accepted(rollout, 0) == before
    behind = glm4_moe.tensors(1)
    assert any(".layers.4." in name for name in differing(rollout, behind))
