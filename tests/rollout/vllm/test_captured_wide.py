"""A step of many sequences that graphs replay, padded to the next size, is the one that is launched. An engine of its own: on a GPU vLLM has
one that may sleep in a process."""

from __future__ import annotations

import pytest

from quintet.rollout.base import Request, Sampling
from tests.rollout.vllm.conftest import DEVICE
from tests.rollout.vllm.test_captured_steps import count_replayed, launched, steps_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on a GPU"),
]
MANY = 300


def test_a_replayed_step_of_many_is_the_one_that_is_launched(start):
    rollout = start("qwen3", sequences_per_rank=MANY)
    sizes = {steps.batch.num_reqs for steps in steps_of(rollout)._graphs.values()}
    assert max(sizes) == 256
    assert len(sizes) < 40
    # Ten end with each step.
    requests = [
        Request([n % 60, 7, n // 60], 1, seed=n, max_response_tokens=(1 + n % 30,)) for n in range(MANY)
    ]
    sampling = Sampling(max_response_tokens=32, ignore_end=True)

    def samples():
        return [(s.response_ids, s.policy_logprobs) for (s,) in rollout.generate(requests, sampling)]

    count_replayed(rollout)
    replayed = samples()
    count = steps_of(rollout).replayed
    assert count > 10
    with launched(rollout):
        assert samples() == replayed
    assert steps_of(rollout).replayed == count
