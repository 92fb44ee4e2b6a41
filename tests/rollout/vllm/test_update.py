"""New weights between sleeping and waking: what is generated is theirs, and memory stays what it was."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch

from quintet.errors import QuintetError, SyncFailure, SyncMismatch
from quintet.models.mcore import whole_box
from quintet.rollout.base import Piece, Request, Sampling
from tests.oracle.models import hub_names
from tests.rollout.vllm.conftest import DEVICE
from tests.rollout.vllm.greedy import greedy, greedy_by_transformers, made
from tests.rollout.vllm.models import model
from tests.rollout.vllm.sent import update
from tests.rollout.vllm.threads import Call

pytestmark = pytest.mark.vllm

MODEL = "qwen3-wide"
OTHER = 2
"""Seed of other weights. Their greedy tokens lead the next best by 0.02 nats at least: on a GPU, vLLM's attention is in bf16."""


@dataclass
class Source:
    """Weights as whole tensors. It pickles, as tensors of 8 bits alone do not (torch 2.11)."""

    tensors: dict[str, torch.Tensor]

    def __getstate__(self) -> bytes:
        torch.save(self.tensors, file := io.BytesIO())
        return file.getvalue()

    def __setstate__(self, state: bytes) -> None:
        self.tensors = torch.load(io.BytesIO(state))

    def pieces(self, receiver: int) -> Iterator[Piece]:
        for name, tensor in self.tensors.items():
            shape = tuple(tensor.shape)
            yield Piece(name, shape, whole_box(shape), tensor.to(DEVICE))


def weights_of(name: str, seed: int = 0) -> Source:
    return Source(
        {k: v.detach().clone() for k, v in hub_names(model(name, seed=seed).named_parameters()).items()}
    )


@pytest.fixture(scope="module", params=["offline", "server"])
def rollout(start, request):
    """Made without weights, as runs make it."""
    made = start(MODEL, mode=request.param, empty=True)
    with pytest.raises(QuintetError, match=r"weights are undefined: .* was made without"):
        greedy(made)
    update(made, weights_of(MODEL))
    assert greedy(made) == greedy_by_transformers(MODEL, 8)
    return made


def sync(rollout, source, level=2):
    rollout.sleep(level)
    rollout.wake("weights")
    update(rollout, source)
    rollout.wake("kv_cache")


def test_weights_that_were_forgotten_are_not_used(rollout):
    rollout.sleep(2)
    with pytest.raises(QuintetError, match="kv_cache and weights are asleep"):
        greedy(rollout)
    rollout.wake("weights")
    rollout.wake("kv_cache")
    with pytest.raises(QuintetError, match="weights are undefined: it forgot them"):
        greedy(rollout)
    update(rollout, weights_of(MODEL))
    assert greedy(rollout) == greedy_by_transformers(MODEL, 8)


def test_new_weights_are_what_generates(rollout):
    sync(rollout, weights_of(MODEL, seed=OTHER))
    other = greedy_by_transformers(MODEL, 8, seed=OTHER)
    assert greedy(rollout) == other != greedy_by_transformers(MODEL, 8)
    found, unreadable = rollout.fingerprints()
    assert len({name for name, _ in found}) + len(unreadable) >= len(list(made(MODEL).named_parameters()))
    sync(rollout, weights_of(MODEL), level=1)
    assert greedy(rollout) == greedy_by_transformers(MODEL, 8)


def test_a_missing_tensor_is_named(rollout):
    source = weights_of(MODEL)
    del source.tensors["model.layers.2.mlp.down_proj.weight"]
    with pytest.raises(SyncMismatch, match=r"layers\.2\.mlp\.down_proj"):
        update(rollout, source)
    update(rollout, weights_of(MODEL))
    assert greedy(rollout) == greedy_by_transformers(MODEL, 8)


def test_requests_under_way_go_on_with_the_new_weights(rollout):
    sampling = Sampling(temperature=0, max_response_tokens=32)
    call = Call(rollout.generate, [Request([k % 60, 1]) for k in range(120)], sampling)
    call.wait_for_some()
    rollout.pause()
    sync(rollout, weights_of(MODEL, seed=OTHER))
    assert not call.ended
    rollout.resume()
    rows = call.result()
    assert {s.finish for (s,) in rows} == {"length"}
    assert all(len(s.response_ids) == 32 == len(s.policy_logprobs) for (s,) in rows)
    sync(rollout, weights_of(MODEL))
    assert greedy(rollout) == greedy_by_transformers(MODEL, 8)


@dataclass
class Breaking(Source):
    """Half of the weights; then the channel breaks."""

    def pieces(self, receiver: int) -> Iterator[Piece]:
        for number, piece in enumerate(super().pieces(receiver)):
            if number == len(self.tensors) // 2:
                raise RuntimeError("it broke off")
            yield piece


def test_nothing_is_generated_with_half_new_weights(rollout):
    sampling = Sampling(temperature=0, max_response_tokens=32)
    call = Call(rollout.generate, [Request([k % 60, 1]) for k in range(120)], sampling)
    call.wait_for_some()
    rollout.pause()
    rollout.sleep(0)
    with pytest.raises(SyncFailure, match="the trainer gave it up"):
        update(rollout, Breaking(weights_of(MODEL, seed=OTHER).tensors))
    rollout.wake("kv_cache")
    rollout.resume()
    with pytest.raises(QuintetError, match="did not arrive whole"):
        greedy(rollout)
    time.sleep(0.5)
    assert not call.ended
    update(rollout, weights_of(MODEL))
    assert {s.finish for (s,) in call.result()} == {"length"}
    assert greedy(rollout) == greedy_by_transformers(MODEL, 8)


def kv_bytes(rollout) -> int:
    """Of the device; on CPU of the KV cache's tensors, 0 where they are in another process."""
    if DEVICE == "cuda":
        return memory()
    if rollout._recipe.mode == "server":
        return 0
    caches = rollout._engine._engine.model_executor.driver_worker.worker.model_runner.kv_caches
    return sum({c.untyped_storage()._cdata: c.untyped_storage().nbytes() for c in caches}.values())


def test_the_kv_cache_sleeps_alone(rollout):
    """Around new weights for a rollout on devices of its own: its weights stay, requests are held and go on."""
    sync(rollout, weights_of(MODEL))
    sampling = Sampling(temperature=0, max_response_tokens=32)
    call = Call(rollout.generate, [Request([k % 60, 1]) for k in range(120)], sampling)
    call.wait_for_some()
    awake = kv_bytes(rollout)
    rollout.pause()
    rollout.sleep(0)
    rollout.sleep(0)
    asleep = kv_bytes(rollout)
    assert asleep < awake or rollout._recipe.mode == "server"
    assert not call.ended
    update(rollout, weights_of(MODEL, seed=OTHER))
    rollout.wake("kv_cache")
    # A device counts all else too: the store of log-probs comes back with the next step, and new weights were on their way.
    slack = 0 if DEVICE == "cpu" else 0.02 * (awake - asleep)
    assert abs(kv_bytes(rollout) - awake) <= slack
    rollout.resume()
    assert {s.finish for (s,) in call.result()} == {"length"}
    other = greedy_by_transformers(MODEL, 8, seed=OTHER)
    assert greedy(rollout) == other
    rollout.sleep(0)
    with pytest.raises(QuintetError, match="kv_cache are asleep"):
        greedy(rollout)
    rollout.wake("kv_cache")
    assert greedy(rollout) == other  # nothing was forgotten
    rollout.sleep(0)
    rollout.sleep(1)  # and deeper
    rollout.wake("weights")
    rollout.wake("kv_cache")
    assert greedy(rollout) == other
    sync(rollout, weights_of(MODEL))
    assert greedy(rollout) == greedy_by_transformers(MODEL, 8)


def memory() -> int:
    """Bytes of this process and of those it started, on the host; on a GPU, of the device."""
    if DEVICE == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    me = psutil.Process(os.getpid())
    return sum(p.memory_info().rss for p in [me, *me.children(recursive=True)])


def lowest_memory(rollout, source, cycles: int = 5) -> int:
    """Bytes after the cycle that left the fewest: weights under way come and go by 2 %."""
    seen = []
    for _ in range(cycles):
        greedy(rollout)
        sync(rollout, source)
        seen.append(memory())
    return min(seen)


def test_twenty_cycles_leave_memory_as_it_was(rollout):
    source = weights_of(MODEL)
    lowest = [lowest_memory(rollout, source) for _ in range(4)]

    def grown_in_a_cycle() -> float:
        return (lowest[-1] - lowest[1]) / (5 * (len(lowest) - 2))

    # An allocator takes another arena now and then; over more cycles that is ever less of each, and a leak as much.
    while grown_in_a_cycle() > 1 << 20 and len(lowest) < 12:
        lowest.append(lowest_memory(rollout, source))
    assert grown_in_a_cycle() <= 1 << 20, [f"{one >> 20} MiB" for one in lowest]
