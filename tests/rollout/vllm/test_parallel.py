"""vLLM on two devices: the same greedy tokens, its memory given up and taken, and a worker that dies."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch

from quintet.errors import UserError, WorkerFailure
from quintet.rollout.base import Request, Sampling
from quintet.rollout.vllm import rollout as rollout_module
from tests.rollout.vllm.conftest import DEVICE
from tests.rollout.vllm.greedy import greedy, greedy_by_transformers
from tests.rollout.vllm.threads import Call

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


MODEL = "qwen3_moe"


@pytest.fixture(scope="module")
def rollout(start):
    # vLLM for CPU does not spread experts over ranks.
    return start(MODEL, layout={"tp": 2, "ep": 2 if DEVICE == "cuda" else 1})


def test_greedy_equals_transformers(rollout):
    assert greedy(rollout) == greedy_by_transformers(MODEL, 8)
    assert len(rollout.receivers()) == 2


def test_sleeps_and_wakes(rollout):
    rollout.sleep(1)
    rollout.sleep(1)
    rollout.wake("weights")
    rollout.wake("kv_cache")
    assert greedy(rollout) == greedy_by_transformers(MODEL, 8)


def test_what_is_held_is_held_in_its_core_too(rollout):
    """Which is a process of its own, and steps whether or not anybody waits for what it makes."""
    sampling = Sampling(max_response_tokens=24, ignore_end=True)
    requests = [Request([k % 60], samples=2, seed=k) for k in range(12)]
    whole = [[s.response_ids for s in row] for row in rollout.generate(requests, sampling)]
    call = Call(rollout.generate, requests, sampling)
    call.wait_for_some(1)
    core = rollout._engine._engine.engine_core
    rollout.pause()
    assert core.call_utility("is_scheduler_paused")
    rollout.sleep(0)
    rollout.wake("kv_cache")
    assert core.call_utility("is_scheduler_paused")
    rollout.resume()
    assert not core.call_utility("is_scheduler_paused")
    assert [[s.response_ids for s in row] for row in call.result()] == whole


def test_a_worker_that_dies_is_named(rollout):
    """The last: nothing of this engine works afterwards."""
    children = psutil.Process().children(recursive=True)
    (worker,) = [c for c in children if "Worker_TP1" in " ".join(c.cmdline())]
    sampling = Sampling(max_response_tokens=32, ignore_end=True)
    call = Call(rollout.generate, [Request([k % 60], samples=8, seed=k) for k in range(200)], sampling)
    call.wait_for_some()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerFailure, match=rf"vLLM: VLLM::Worker_TP1\S* \(process {worker.pid}\) died"):
        call.result(timeout_s=60)
    with pytest.raises(WorkerFailure, match="Worker_TP1"):
        rollout.generate([Request([1])], sampling)


@pytest.mark.nightly
def test_a_worker_without_memory_says_so(start, monkeypatch, capfd):
    """The engine is made here, and what fails is in another process, which writes why on stdout."""
    of_recipe = rollout_module.engine_arguments

    def too_much(*args):
        return of_recipe(*args) | {"kv_cache_memory_bytes": 1 << 50}

    monkeypatch.setattr(rollout_module, "engine_arguments", too_much)
    said = (
        r"vLLM .* cannot start as the recipe asks: .*1048576\.0 GiB" if DEVICE == "cpu" else "out of memory"
    )
    with pytest.raises((UserError, RuntimeError), match=said):
        start("qwen3", layout={"tp": 2})
    assert "Worker_TP" in capfd.readouterr().out
