"""The experts that vLLM tells of are those that transformers chooses."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quintet.errors import QuintetError, SyncMismatch
from quintet.models import read_shape
from quintet.rollout import Request, Sampling
from quintet.rollout.vllm.routes import KeepsFirstRoutes, Listener, routes_of
from quintet.sync.logprob_probe import check, engine_scores, limits, sequences
from tests.oracle.cases import Case
from tests.oracle.data import VOCAB
from tests.oracle.pool import Pool
from tests.oracle.ranks import engine_of
from tests.rollout.prompts import PROMPTS
from tests.rollout.vllm.conftest import DEVICE
from tests.rollout.vllm.greedy import made
from tests.rollout.vllm.models import save


def chosen_by_transformers(name: str, ids: list[int]) -> np.ndarray:
    """Sorted experts [tokens - 1, layers with experts, top-k]."""
    one = made(name)
    with torch.no_grad():
        logits = one(input_ids=torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
    return (
        torch.stack([of_layer.topk(one.config.num_experts_per_tok).indices for of_layer in logits], 1)
        .sort(-1)
        .values.numpy()
    )


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_routes_are_those_of_transformers(start: Any) -> None:
    rollout = start("qwen3_moe", layout={"tp": 2}, return_routes=True)
    long = [k % 60 for k in range(30)]
    rows = rollout.generate(
        [Request(p, samples=3, seed=5) for p in [*PROMPTS, long]], Sampling(max_response_tokens=9)
    )
    for prompt, samples in zip([*PROMPTS, long], rows, strict=True):
        for sample in samples:
            ids = prompt + sample.response_ids
            assert sample.routes.dtype == np.int16
            assert np.array_equal(np.sort(sample.routes, -1), chosen_by_transformers("qwen3_moe", ids))


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_routes_of_preempted_requests_are_theirs(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests of two blocks at the end."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, preempted = Scheduler._preempt_request, []

    def heard(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.num_computed_tokens)
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", heard)
    rollout = start("qwen3_moe", return_routes=True, vllm=SMALL)
    prompts = [[(7 * n + k) % 60 for k in range(28)] for n in range(6)]
    asked = [Request(prompt, seed=n) for n, prompt in enumerate(prompts)]
    rows = rollout.generate(asked, Sampling(max_response_tokens=32, ignore_end=True))
    assert len(preempted) >= 3
    for prompt, (sample,) in zip(prompts, rows, strict=True):
        want = chosen_by_transformers("qwen3_moe", prompt + sample.response_ids)
        assert np.array_equal(np.sort(sample.routes, -1), want)


SMALL = {"num_gpu_blocks_override": 8, "block_size": 32}
"""A KV cache of seven blocks: one stays empty."""


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_routes_are_of_the_forward_that_log_probs_are_of(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a request first loses its place, and again when all are held as for new weights, the first router's experts change numbers:
    what is read anew goes to others. Its inputs depend on no router. On a GPU with vLLM's prefix cache and its own routes, on a CPU with
    those that are heard."""
    from vllm.v1.core.sched.scheduler import Scheduler

    rollout = start("qwen3_moe", return_routes=True, vllm=SMALL)
    core = rollout._engine._engine.engine_core.engine_core
    gate = core.model_executor.driver_worker.worker.model_runner.get_model().model.layers[0].mlp.gate
    preempt, schedule, computed, steps = Scheduler._preempt_request, Scheduler.schedule, {}, []

    def turn(requests: list[Any]) -> None:
        computed.update({tuple(one.prompt_token_ids): one.num_computed_tokens for one in requests})
        if DEVICE == "cpu":  # which holds the weight packed
            gate.register_forward_hook(lambda layer, args, out: (out[0].flip(-1), *out[1:]))
        else:
            gate.weight.data.copy_(gate.weight.data.flip(0))

    def preempted(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not computed:
            turn([*self.running, request])
        return preempt(self, request, *args, **kwargs)

    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(len(self.running))
        if len(steps) == 12:
            turn(self.running)
            assert self.reset_prefix_cache(reset_running_requests=True)
        return schedule(self, *args, **kwargs)

    def wrong(first: int, count: int, before: int) -> float:
        """The share of tokens with other routes than those of `before` the turn or after it, as they were computed."""
        prompts = [[(7 * n + k) % 60 for k in range(28)] for n in range(first, first + count)]
        asked = [Request(prompt, seed=n) for n, prompt in enumerate(prompts)]
        rows, other = rollout.generate(asked, Sampling(max_response_tokens=32, ignore_end=True)), []
        for prompt, (sample,) in zip(prompts, rows, strict=True):
            routes = chosen_by_transformers("qwen3_moe", prompt + sample.response_ids)[:, 0]
            at, turned = computed.get(tuple(prompt), 0), np.sort(7 - routes, -1)
            both = (routes, turned) if before == 0 else (turned, routes)
            want = np.concatenate([both[0][:at], both[1][at:]])
            other.append((np.sort(sample.routes[:, 0], -1) != want).any(-1).mean())
        return float(max(other))

    most = 0 if DEVICE == "cpu" else 0.1  # in bf16 near ties differ
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_preempt_request", preempted)
        assert wrong(0, 6, before=0) <= most
    assert sum(before > 28 for before in computed.values()) >= 2  # log-probs, too, are of before
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "schedule", held)
        assert wrong(6, 2, before=1) <= most
    assert steps[11] == 2
    assert min(list(computed.values())[-2:]) > 28


class Slots:
    """As vLLM's scheduler for GPUs: routes lie in slots that a request has until it loses its place or ends."""

    def __init__(self) -> None:
        self.slots = np.zeros((16, 1, 2), np.int32)
        self.of: dict[str, list[int]] = {}

    def _get_routed_experts(self, request: Any) -> np.ndarray:
        return self.slots[self.of[request.request_id][: request.num_tokens - 1]]

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        del self.of[request.request_id]
        request.num_computed_tokens = 0

    def _free_request(self, request: Any) -> None:
        del self.of[request.request_id]


class FirstRoutesInSlots(KeepsFirstRoutes, Slots):
    """What `first_routes` makes of vLLM's own."""


def test_a_request_keeps_the_routes_of_its_first_forward() -> None:
    """It loses its place twice, the second time before it is read as far as it was; another takes its slots."""
    scheduler = FirstRoutesInSlots()
    one = SimpleNamespace(request_id="one", num_tokens=5, num_computed_tokens=0)

    def step(slots: list[int], first: int, expert: int, upto: int) -> None:
        scheduler.of["one"] = slots
        scheduler.slots[slots[first:upto]] = [[[expert, expert + 1]]]
        one.num_computed_tokens = upto

    step([3, 4, 5, 6], 0, 1, 4)
    one.num_tokens = 5
    scheduler._preempt_request(one, 0.0)
    scheduler.slots[3:6] = 9  # of another
    step([7, 8, 9, 10], 0, 3, 2)
    scheduler._preempt_request(one, 0.0)
    step([0, 1, 2, 3, 4, 5], 0, 5, 5)
    one.num_tokens = 7
    step([0, 1, 2, 3, 4, 5], 5, 6, 6)
    assert scheduler._get_routed_experts(one)[:, 0, 0].tolist() == [1, 1, 1, 1, 5, 6]
    scheduler._free_request(one)
    scheduler.of["one"] = [0, 1]  # a later request of that name
    one.num_tokens = 3
    assert scheduler._get_routed_experts(one)[:, 0, 0].tolist() == [5, 5]


def trained_on(
    name: str, path: Path, ids: list[list[int]], prompt: int, told: list[Tensor]
) -> dict[str, Any]:
    """On one rank, log-probs of the responses' tokens by engines on the same weights: in fp32 with routes of its own, and with those
    that are told, which one in bf16 is told as well. And what this one says of the probe's tokens, as it is and with one expert turned
    round."""
    from quintet.data.batch import make_batch, tokens
    from quintet.engine.routes import BatchRoutes
    from quintet.packing import RankCell

    batch = make_batch(ids, [prompt] * len(ids), routes=told)
    cells, on = [RankCell([n]) for n in range(len(ids))], tokens(batch, "loss_mask") > 0
    engines = {dtype: engine_of(Case(name, dtype=dtype), path, trained=False) for dtype in ("fp32", "bf16")}

    def logprobs(dtype: str, routes: Any) -> Tensor:
        return engines[dtype].forward(batch, cells, 1.0, routes).logprobs[on]

    replayed = {dtype: logprobs(dtype, BatchRoutes(batch["routes"])) for dtype in engines}
    probed = {"probe": engine_scores(engines["bf16"], sequences(VOCAB, 64, experts=True))}
    for shard in engines["bf16"].shard_map():
        if re.search(r"layers\.1\..*experts\.2\.(down_proj|w2)", shard.name):
            shard.view.data.neg_()
    probed["other"] = engine_scores(engines["bf16"], sequences(VOCAB, 64, experts=True))
    return {"natural": logprobs("fp32", None)} | replayed | probed


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_with_replay_rounding_is_all_that_parts_trainer_and_vllm(
    start: Any, tmp_path: Path, name: str
) -> None:
    """vLLM in bf16 and an engine in fp32. What rounding comes to is told by an engine in bf16: vLLM cannot be told routes."""
    path = save(name, tmp_path)
    rollout = start(name, path, dtype="bf16", return_routes=True)
    prompts = [[(7 * n + 3 * k * k + k) % 61 for k in range(32)] for n in range(64)]
    asked = [Request(prompt, samples=2, seed=n) for n, prompt in enumerate(prompts)]
    rows = rollout.generate(asked, Sampling(max_response_tokens=32, ignore_end=True))
    probed = rollout.score(sequences(VOCAB, 64, experts=True))
    rollout.close()  # two engines in one process share its process groups
    samples = [sample for row in rows for sample in row]
    ids = [p + sample.response_ids for p, row in zip(prompts, rows, strict=True) for sample in row]
    told = torch.tensor([value for sample in samples for value in sample.policy_logprobs])
    routes = [torch.from_numpy(sample.routes) for sample in samples]
    pool = Pool(size=1)  # of this test alone: `start` looks for processes that stayed
    try:
        (found,) = pool.run(trained_on, 1, name, path, ids, 32, routes)
    finally:
        pool.close()
    off, on, same = (
        (a - b).abs()
        for a, b in (
            (told, found["natural"]),
            (told, found["fp32"]),
            (found["bf16"], found["fp32"]),
        )
    )
    for what, gap in (("off", off), ("on", on), ("one and the same", same)):
        print(f"{name}, {len(gap)} tokens, {what}: mean {gap.mean():.4f}, max {gap.max():.3f}")
    assert on.mean() <= 1.3 * same.mean()
    assert off.mean() > 1.3 * on.mean()
    within = limits(None, "bf16", experts=True, quantized=False)
    print(
        f"probe: {check(found['probe'], probed, sequences(VOCAB, 64, experts=True), within, 'rollout-0'):.3f}"
    )
    with pytest.raises(SyncMismatch, match="does not compute"):
        check(found["other"], probed, sequences(VOCAB, 64, experts=True), within, "rollout-0")


def test_what_is_computed_again_after_a_preemption_is_not_heard_again() -> None:
    """A request of four tokens of prompt draws two, loses its place, and is computed anew from its first token."""
    batch = SimpleNamespace(req_ids=["other", "a"], num_computed_tokens_cpu=[0, 0])
    runner = SimpleNamespace(input_batch=batch, query_start_loc=SimpleNamespace(np=[0, 1, 0]))
    listener = Listener(runner, [1, 3])

    def step(first: int, tokens: int, expert: int) -> None:
        batch.num_computed_tokens_cpu[1] = first
        runner.query_start_loc.np = [0, 1, 1 + tokens]
        for layer in (1, 3):
            listener.capture(layer, torch.full((1 + tokens, 2), expert + layer))

    step(0, 4, 10)
    step(4, 1, 20)
    step(5, 1, 30)
    step(0, 6, 40)  # other experts, by rounding
    step(6, 1, 50)
    routes = listener.take()["a"][:7]
    assert routes[:, 0, 0].tolist() == [11, 11, 11, 11, 21, 31, 51]
    assert (routes[:, 1] == routes[:, 0] + 2).all()
    step(0, 2, 60)  # a request of another call may have the same name
    assert listener.take()["a"][:2, 0, 0].tolist() == [61, 61]


def test_routes_that_are_not_all_known_are_refused(tmp_path: Any) -> None:
    shape = read_shape(save("glm4_moe", tmp_path))  # its first layer is dense
    told = np.arange(10 * 4 * 2).reshape(10, 4, 2)
    assert np.array_equal(routes_of(told, shape, 10), told[:9, 1:])
    assert np.array_equal(routes_of(told[:, 1:], shape, 11), told[:, 1:])
    with pytest.raises(QuintetError, match=r"routes \[10, 4, 2\] of 12 tokens"):
        routes_of(told, shape, 12)
    told[3, 2] = -1
    with pytest.raises(QuintetError, match="those of every token but the last are needed"):
        routes_of(told, shape, 10)
