"""gpt-oss in vLLM, whose loader writes experts, their biases and sinks by itself: they are new after a sync, where graphs know them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quintet.errors import SyncMismatch
from tests.rollout.vllm.conftest import DEVICE
from tests.rollout.vllm.greedy import greedy, greedy_by_transformers, made
from tests.rollout.vllm.sent import update
from tests.rollout.vllm.test_worker import Source, differing, named_weights

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LOST = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj_bias", "self_attn.sinks")


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.nightly), 2], ids="tp{}".format)
def rollout(request: pytest.FixtureRequest, start: Any) -> Iterator[Any]:
    """On one device and on two, whose workers run functions of this file."""
    tp = min(request.param, torch.cuda.device_count()) if DEVICE == "cuda" else request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        yield start("gpt_oss", layout={"tp": tp})


def in_worker(rollout: Any, function: Any) -> Any:
    return rollout._engine._engine.collective_rpc(function)


def places(worker: Any) -> dict[str, int]:
    return {name: one.data_ptr() for name, one in worker.model_runner.get_model().named_parameters()}


def spoil(worker: Any) -> None:
    """What level-2 sleep does on a GPU."""
    for one in worker.model_runner.get_model().parameters():
        one.data.fill_(float("nan"))


def copy_sinks(worker: Any) -> None:
    """What FlashInfer does when weights were loaded, because it computes with sinks in fp32."""
    for layer in worker.model_runner.get_model().model.layers:
        layer.attn.attn.impl.sinks = layer.attn.sinks.detach().float().clone()


def test_new_weights(rollout: Any) -> None:
    before = in_worker(rollout, places)
    for seed in range(1, 5):
        named = named_weights(made("gpt_oss", seed))
        wanted = None if seed == 1 else rollout.receivers()  # then the parts that are read
        if seed == 3:
            in_worker(rollout, spoil)
        if seed == 4:
            in_worker(rollout, copy_sinks)
        update(rollout, Source(named, 2, wanted=wanted))
        assert differing(rollout, named) == []
        if DEVICE == "cpu":
            assert greedy(rollout) == greedy_by_transformers("gpt_oss", 8, seed)
        assert in_worker(rollout, places) == before


@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_on_the_way_is_named(rollout: Any, name: str) -> None:
    lost = f"model.layers.2.{name}"
    named = named_weights(made("gpt_oss", 1))
    with pytest.raises(SyncMismatch, match=f"did not get {lost}:"):
        update(rollout, Source(named, dropped=[lost]))
    update(rollout, Source(named))
