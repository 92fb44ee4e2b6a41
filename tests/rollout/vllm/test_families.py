"""Greedy tokens and log-probs of several families are transformers'."""

from __future__ import annotations

import pytest

from quintet.rollout.base import Request, Sampling
from tests.rollout.prompts import PROMPTS
from tests.rollout.vllm.conftest import TOLERANCE
from tests.rollout.vllm.greedy import greedy_by_transformers, logprobs_by_transformers

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("name", [pytest.param("qwen2", marks=pytest.mark.nightly), "qwen3_moe"])
def test_greedy_equals_transformers(start, name):
    rollout = start(name)
    rows = rollout.generate([Request(p) for p in PROMPTS], Sampling(temperature=0, max_response_tokens=8))
    assert [s.response_ids for (s,) in rows] == greedy_by_transformers(name, 8)
    for prompt, (sample,) in zip(PROMPTS, rows, strict=True):
        told = logprobs_by_transformers(name, prompt + sample.response_ids)[len(prompt) - 1 :]
        assert sample.policy_logprobs == pytest.approx(told, abs=TOLERANCE)
    rollout.close()  # two engines in one process share its process groups


def test_drafts_are_counted_and_change_nothing(start):
    """Speculation from n-grams of the prompt needs no model that drafts. As a server, because numba, which finds them, may not
    be in a process in which vLLM starts once more."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    rollout = start("qwen2", mode="server", vllm={"speculative_config": drafts})
    rows = rollout.generate([Request(p) for p in PROMPTS], Sampling(temperature=0, max_response_tokens=8))
    assert [s.response_ids for (s,) in rows] == greedy_by_transformers("qwen2", 8)
    (row,) = rollout.generate([Request([3, 4, 3, 4, 3], samples=4)], Sampling(max_response_tokens=12))
    for sample in row:
        told = logprobs_by_transformers("qwen2", [3, 4, 3, 4, 3, *sample.response_ids])[4:]
        assert sample.policy_logprobs == pytest.approx(told, abs=TOLERANCE)
    counted = rollout.metrics()
    assert counted["drafts"] > 0
    assert counted["drafts"] <= counted["draft_tokens"] <= 2 * counted["drafts"]
    assert 0 <= counted["accepted_tokens"] <= counted["draft_tokens"]
