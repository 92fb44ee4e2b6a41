"""vLLM's synchronous engine says what transformers says, and what it is asked for."""

from __future__ import annotations

import pytest
import torch

from quintet.rollout import Request, Sampling
from tests.rollout.vllm.conftest import TOLERANCE
from tests.rollout.vllm.models import model

pytestmark = pytest.mark.vllm

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7], [40, 41], [60, 0, 60, 0, 60]]


@pytest.fixture(scope="module")
def rollout(start):
    return start("qwen3")


def logprobs_of(name: str, ids: list[int]) -> torch.Tensor:
    """Transformers' log-probs of every token but the first, given those before it."""
    with torch.no_grad():
        rows = model(name)(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_greedy_equals_transformers(rollout):
    made = model("qwen3")
    rows = rollout.generate([Request(p) for p in PROMPTS], Sampling(temperature=0, max_response_tokens=8))
    for prompt, (sample,) in zip(PROMPTS, rows, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(8):
                ids.append(int(made(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert sample.response_ids == ids[len(prompt) :]
        expected = logprobs_of("qwen3", ids)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(sample.policy_logprobs), expected, atol=TOLERANCE, rtol=0)
        assert sample.logprobs == [0.0] * 8
        assert sample.finish == "length"


def test_score_is_what_was_told(rollout):
    (row,) = rollout.generate([Request([5, 9, 2], samples=3, seed=3)], Sampling(max_response_tokens=10))
    scored = rollout.score([[5, 9, 2, *s.response_ids] for s in row] + [[7], [7, 8]])
    for sample, logprobs in zip(row, scored[:3], strict=True):
        assert logprobs[2:] == pytest.approx(sample.raw_logprobs, abs=TOLERANCE)
    assert [len(s) for s in scored] == [12, 12, 12, 0, 1]
