"""vLLM's asynchronous engine: the same samples, requests held, given up and gone on with."""

from __future__ import annotations

import threading
import time

import pytest

from quintet.rollout.base import Request, Sampling
from tests.rollout.vllm.conftest import DEVICE
from tests.rollout.vllm.threads import Call

pytestmark = pytest.mark.vllm

LONG = Sampling(max_response_tokens=32, ignore_end=True)
ROUNDING = 1e-4 if DEVICE == "cpu" else 0.05
"""Of a log-prob beside other sequences, whose number takes other kernels."""


@pytest.fixture(scope="module", params=["server", "offline"])
def rollout(start, request):
    return start("qwen3", mode=request.param, sequences_per_rank=4)


def many(count: int) -> list[Request]:
    """Of different lengths, so that they do not end together."""
    return [Request([5, 9, 2 + k % 7], 2, seed=k, max_response_tokens=(32, 9 + k % 5)) for k in range(count)]


def responses(rows):
    return [[s.response_ids for s in row] for row in rows]


def logprobs(rows):
    return [logprob for row in rows for s in row for logprob in s.policy_logprobs]


def test_samples_do_not_depend_on_company(rollout):
    together = rollout.generate(many(6), LONG)
    alone = [rollout.generate([request], LONG)[0] for request in many(6)]
    assert responses(together) == responses(alone)
    assert len({tuple(s.response_ids) for row in together for s in row}) == 12


def test_pause_holds_and_resume_goes_on(rollout):
    whole = rollout.generate(many(60), LONG)
    call = Call(rollout.generate, many(60), LONG)
    call.wait_for_some()
    rollout.pause()
    done = call.done
    time.sleep(0.3)
    assert not call.ended
    assert call.done == done
    second = Call(rollout.generate, many(1), LONG)
    time.sleep(0.2)
    assert not second.ended
    rollout.resume()
    assert responses(call.result()) == responses(whole)
    assert logprobs(call.result()) == pytest.approx(logprobs(whole), abs=ROUNDING)
    assert responses(second.result()) == responses(whole[:1])


def test_a_sleeping_cache_changes_no_sample(rollout):
    """Requests are read anew, with the tokens they have: none is lost, and each has its own log-prob."""
    whole = rollout.generate(many(60), LONG)
    call = Call(rollout.generate, many(60), LONG)
    for _ in range(3):
        call.wait_for_some()
        rollout.pause()
        rollout.sleep(0)
        rollout.wake("kv_cache")
        assert not call.ended
        rollout.resume()
        time.sleep(0.05)
    assert responses(call.result()) == responses(whole)
    assert logprobs(call.result()) == pytest.approx(logprobs(whole), abs=ROUNDING)


def test_abort_ends_what_is_under_way(rollout):
    whole = responses(rollout.generate(many(60), LONG))
    call = Call(rollout.generate, many(60), LONG)
    call.wait_for_some()
    rollout.abort()
    rows = call.result()
    ends = [s.finish for row in rows for s in row]
    assert set(ends) == {"length", "abort"}
    for row, full in zip(rows, whole, strict=True):
        for sample, ids in zip(row, full, strict=True):
            count = len(sample.response_ids)
            assert sample.response_ids == ids[:count]
            assert len(sample.policy_logprobs) == count
    assert any(len(s.response_ids) > 0 for row in rows for s in row if s.finish == "abort")
    assert responses(rollout.generate(many(1), LONG)) == whole[:1]


def test_abort_ends_what_has_only_just_been_asked_for(rollout):
    """vLLM prepares prompts before it knows their requests."""
    call = Call(rollout.generate, many(60), LONG)
    while not rollout._engine._under_way:
        time.sleep(0)
    rollout.abort()
    ends = [s.finish for row in call.result() for s in row]
    assert ends.count("abort") > 0.9 * len(ends)


def test_abort_while_paused_stays_paused(rollout):
    call = Call(rollout.generate, many(20), LONG)
    call.wait_for_some()
    rollout.pause()
    rollout.abort()
    assert {s.finish for row in call.result() for s in row} == {"length", "abort"}
    after = Call(rollout.generate, many(1), LONG)
    time.sleep(0.2)
    assert not after.ended
    rollout.resume()
    assert [s.finish for s in after.result()[0]] == ["length", "length"]


def test_nothing_is_left_behind(rollout):
    rollout.abort()  # nothing is under way
    rollout.pause()
    rollout.pause()
    rollout.resume()
    assert responses(rollout.generate(many(1), LONG))
    assert [t.name for t in threading.enumerate()].count("vllm-server") <= 1
