"""Adapters alone: vLLM computes them beside the weights that it read, and says what the merged model says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.compare import compare
from quintet.engine.weights.fingerprint import fingerprints
from quintet.errors import QuintetError, SyncMismatch
from quintet.models.lora import PEFT_PREFIX
from quintet.rollout.base import Request, Sampling
from quintet.rollout.vllm.offline import OfflineEngine
from tests.rollout.vllm.conftest import DEVICE, TOLERANCE
from tests.rollout.vllm.greedy import PROMPTS
from tests.rollout.vllm.models import model
from tests.rollout.vllm.sent import update
from tests.rollout.vllm.test_worker import DTYPE, Source, flip_norm, named_weights, whole

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

RANK, SCALE = 4, 1.5  # vLLM has room for 8; a scale that no B in a narrow type can be divided by again
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def adapters_of(seed: int) -> dict[str, Tensor]:
    """As an engine sends them: the scale is in B."""
    layers = [*model("qwen3").named_modules()]
    torch.manual_seed(seed)
    named = {}
    for name, module in layers:
        if name.rpartition(".")[2] in TARGETS:
            b = torch.randn(module.out_features, RANK, dtype=DTYPE) / 8
            named[f"{PEFT_PREFIX}{name}.lora_A.weight"] = (
                torch.randn(RANK, module.in_features, dtype=DTYPE) / 8
            )
            named[f"{PEFT_PREFIX}{name}.lora_B.weight"] = (b.float() * SCALE).to(DTYPE)
    return named


def merged(named: dict[str, Tensor]) -> Any:
    """The model with the adapters in its weights."""
    made = model("qwen3")
    for name, module in made.named_modules():
        a, b = (named.get(f"{PEFT_PREFIX}{name}.lora_{x}.weight") for x in "AB")
        if a is not None and b is not None:
            module.weight.data += b.float() @ a.float()
    return made


def greedy_by(made: Any, tokens: int) -> Iterator[tuple[list[int], list[float]]]:
    """Greedy responses to PROMPTS, and their log-probs."""
    for prompt in PROMPTS:
        ids, logprobs = list(prompt), []
        for _ in range(tokens):
            with torch.no_grad():
                row = made(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
        yield ids[len(prompt) :], logprobs


def differing(rollout: Any, named: dict[str, Tensor]) -> list[str]:
    """The tensors that the proof names: of the adapters, and of the weights beside them."""
    named = named_weights(model("qwen3")) | named
    engine = fingerprints((n, tuple(t.shape), whole(t), t) for n, t in named.items())
    found, unreadable = rollout.fingerprints()
    assert not {one for one in unreadable if DEVICE != "cpu" or one.startswith(PEFT_PREFIX)}
    shapes = {n: tuple(t.shape) for n, t in named.items()}
    return [d.name for d in compare([engine], [found], shapes, unreadable)]


CASES = [
    pytest.param(("offline", 1), id="offline"),
    pytest.param(("server", 2), marks=pytest.mark.nightly, id="server-tp2"),
]


@pytest.fixture(scope="module", params=CASES)
def rollout(request: pytest.FixtureRequest, start: Any) -> Any:
    mode, tp = request.param
    tp = min(tp, torch.cuda.device_count()) if DEVICE == "cuda" else tp
    lora = {"rank": RANK, "alpha": SCALE * RANK, "targets": TARGETS}
    return start("qwen3", lora=lora, mode=mode, layout={"tp": tp}, adapter_sync="separate")


def test_nothing_is_generated_without_them(rollout: Any) -> None:
    with pytest.raises(QuintetError, match="made without"):
        rollout.generate([Request([1])], Sampling(max_response_tokens=4))


def test_what_is_generated_is_the_merged_model_s(rollout: Any) -> None:
    sampling = Sampling(temperature=0, max_response_tokens=8)
    said = []
    for seed in (1, 2, 3):
        named, wanted = adapters_of(seed), rollout.receivers()
        assert all((one is None) == (seed == 1 or len(wanted) == 1) for one in wanted)
        update(rollout, Source(named, wanted=wanted))
        assert differing(rollout, named) == []
        rows = rollout.generate([Request(p) for p in PROMPTS], sampling)
        said.append([sample.response_ids for (sample,) in rows])
        for prompt, (sample,), (ids, logprobs) in zip(
            PROMPTS, rows, greedy_by(merged(named), 8), strict=True
        ):
            if DEVICE == "cpu":  # in bf16, tokens that are nearly as likely change places
                assert sample.response_ids == ids
                assert sample.policy_logprobs == pytest.approx(logprobs, abs=TOLERANCE)
            (scored,) = rollout.score([[*prompt, *sample.response_ids]])
            assert scored[len(prompt) - 1 :] == pytest.approx(sample.policy_logprobs, abs=TOLERANCE)
    assert said[0] != said[1]
    assert said[1] != said[2]


def test_they_are_kept_in_sleep(rollout: Any) -> None:
    named = adapters_of(4)
    update(rollout, Source(named))
    rollout.sleep(2)
    rollout.wake("weights")
    rollout.wake("kv_cache")
    assert differing(rollout, named) == []
    rows = rollout.generate([Request(PROMPTS[0])], Sampling(temperature=0, max_response_tokens=4))
    if DEVICE == "cpu":
        assert rows[0][0].response_ids == next(greedy_by(merged(named), 4))[0]


def test_what_does_not_come_or_changes_is_named(rollout: Any) -> None:
    named = adapters_of(5)
    lost = f"{PEFT_PREFIX}model.layers.1.self_attn.o_proj.lora_B.weight"
    with pytest.raises(SyncMismatch, match=f"did not get {lost}:"):
        update(rollout, Source(named, dropped=[lost]))
    update(rollout, Source(named | {lost: named[lost] * 2}))
    assert differing(rollout, named) == [lost]
    if isinstance(rollout._engine, OfflineEngine):
        rollout._engine._engine.collective_rpc(flip_norm)
        assert differing(rollout, named) == ["model.norm.weight", lost]
        rollout._engine._engine.collective_rpc(flip_norm)


def drop(worker: Any) -> None:
    """As vLLM does when it warms up or loads other weights."""
    worker.model_runner.lora_manager.remove_all_adapters()


def test_they_come_again_where_vllm_has_dropped_them(rollout: Any) -> None:
    if not isinstance(rollout._engine, OfflineEngine):
        return  # its workers are the same
    named = adapters_of(6)
    update(rollout, Source(named))
    rollout._engine._engine.collective_rpc(drop)
    update(rollout, Source(named))
    assert differing(rollout, named) == []
    rows = rollout.generate([Request(PROMPTS[0])], Sampling(temperature=0, max_response_tokens=4))
    if DEVICE == "cpu":
        assert rows[0][0].response_ids == next(greedy_by(merged(named), 4))[0]
