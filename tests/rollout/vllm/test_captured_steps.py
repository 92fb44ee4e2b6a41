"""A step that graphs replay is the one that was captured: the same tokens and log-probs, whatever is asked beside it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from quintet.rollout.base import Request, Sampling
from quintet.rollout.vllm import compat
from tests.rollout.vllm.conftest import DEVICE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on a GPU"),
]
PROMPTS = [[(7 * n + k) % 60 for k in range(28)] for n in range(5)]
LENGTHS = [3, 32, 7, 20, 12]
SMALL = {"num_gpu_blocks_override": 6, "block_size": 32}
"""A KV cache of five blocks, and one that stays empty: sequences lose their place in every call, and come back in another row."""


def steps_of(rollout):
    worker = compat.core_here(rollout._engine._engine).model_executor.driver_worker.worker
    return worker.model_runner.execute_model.__self__


def count_replayed(rollout):
    """Have the steps that are replayed from now on counted, in `replayed`."""
    steps = steps_of(rollout)
    steps.replayed = 0
    for size, captured in steps._graphs.items():

        class Counted:
            def replay(self, graph=captured.after):
                steps.replayed += 1
                graph.replay()

        steps._graphs[size] = captured._replace(after=Counted())


@pytest.fixture(scope="module")
def rollout(start):
    made = start("qwen3", sequences_per_rank=8, vllm=SMALL)
    count_replayed(made)
    return made


@contextmanager
def launched(rollout):
    """Within, no step is replayed."""
    steps = steps_of(rollout)
    graphs, steps._graphs = steps._graphs, {}
    yield
    steps._graphs = graphs


def samples(rollout, seed=1, **sampling):
    given = {"max_response_tokens": 32, "ignore_end": True}
    requests = [
        Request(p, 2, seed=seed + at, max_response_tokens=(n, 33 - n))
        for at, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]
    rows = rollout.generate(requests, Sampling(**given | sampling))
    return [(s.response_ids, s.policy_logprobs) for row in rows for s in row]


def test_sequences_lose_their_place(rollout, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, preempted = Scheduler._preempt_request, []

    def heard(self, request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", heard)
    samples(rollout)
    assert preempted


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}], ids=["sampled", "greedy"])
def test_a_replayed_step_is_the_one_that_is_launched(rollout, sampling):
    before = steps_of(rollout).replayed
    replayed = samples(rollout, **sampling)
    assert steps_of(rollout).replayed > before + 20
    before = steps_of(rollout).replayed
    with launched(rollout):
        assert samples(rollout, **sampling) == replayed
    assert steps_of(rollout).replayed == before
    assert samples(rollout, seed=2, **sampling) != replayed or sampling


def test_what_no_graph_was_captured_for_is_launched(rollout):
    cut = {"top_k": 3, "top_p": 0.9}
    before = steps_of(rollout).replayed
    drawn = samples(rollout, **cut)
    assert steps_of(rollout).replayed == before
    with launched(rollout):
        assert samples(rollout, **cut) == drawn
    assert samples(rollout) != drawn


def test_a_step_is_replayed_after_sleep(rollout):
    replayed = samples(rollout)
    rollout.sleep(1)
    for part in ("weights", "kv_cache"):
        rollout.wake(part)
    before = steps_of(rollout).replayed
    assert samples(rollout) == replayed
    assert steps_of(rollout).replayed > before + 20
