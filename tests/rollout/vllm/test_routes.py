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
from quintet.rollout.base import Request, Sampling
from quintet.rollout.vllm.jobs import Answer, completed
from quintet.rollout.vllm.routes import Listener, of_all_layers, routes_of
from quintet.rollout.vllm.token_records import ASKS, RecordsByRequest
from quintet.rollout.vllm.token_store import TokenStore
from quintet.sync.logprob_probe import check, engine_scores, limits, sequences
from tests.oracle.cases import Case
from tests.oracle.data import VOCAB
from tests.oracle.pool import Pool
from tests.oracle.ranks import engine_of
from tests.rollout.prompts import PROMPTS
from tests.rollout.vllm.conftest import DEVICE
from tests.rollout.vllm.greedy import made
from tests.rollout.vllm.models import save

MOST = 0 if DEVICE == "cpu" else 0.1
"""Share of tokens that may go elsewhere than in transformers: in bf16 near ties differ."""


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
@pytest.mark.parametrize(("mode", "tp"), [("offline", 2), ("server", 1)])
def test_routes_are_those_of_transformers(start: Any, mode: str, tp: int) -> None:
    tp = tp if DEVICE == "cpu" else min(tp, torch.cuda.device_count())
    rollout = start("qwen3_moe", layout={"tp": tp}, mode=mode, return_routes=True)
    long = [k % 60 for k in range(30)]
    rows = rollout.generate(
        [Request(p, samples=3, seed=5) for p in [*PROMPTS, long]], Sampling(max_response_tokens=9)
    )
    for prompt, samples in zip([*PROMPTS, long], rows, strict=True):
        for sample in samples:
            ids = prompt + sample.response_ids
            assert sample.routes.dtype == (np.int16 if DEVICE == "cpu" else np.uint8)
            assert parted(sample.routes, chosen_by_transformers("qwen3_moe", ids)) <= MOST
    rollout.close()  # two engines in one process share its process groups


def parted(routes: np.ndarray, want: np.ndarray) -> float:
    """The share of tokens and layers that are sent to others than is wanted."""
    assert routes.shape == want.shape
    return float((np.sort(routes, -1) != want).any(-1).mean())


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
        assert parted(sample.routes, want) <= MOST
    rollout.close()


SMALL = {"num_gpu_blocks_override": 8, "block_size": 32}
"""A KV cache of seven blocks: one stays empty."""


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_routes_are_of_the_forward_that_log_probs_are_of(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a request first loses its place, and again when all are held as for new weights, the first router's experts change numbers:
    what is read anew goes to others. Its inputs depend on no router. On a GPU with vLLM's prefix cache and steps that are scheduled ahead:
    what a step under way draws is kept by who loses its place, and thrown away by who is held."""
    from vllm.v1.core.sched.scheduler import Scheduler

    rollout = start("qwen3_moe", return_routes=True, vllm=SMALL)
    core = rollout._engine._engine.engine_core.engine_core
    gate = core.model_executor.driver_worker.worker.model_runner.get_model().model.layers[0].mlp.gate
    preempt, schedule, computed, steps = Scheduler._preempt_request, Scheduler.schedule, {}, []

    def turn(tokens: dict[Any, int]) -> None:
        computed.update({tuple(one.prompt_token_ids): n for one, n in tokens.items()})
        if DEVICE == "cpu":  # which holds the weight packed
            gate.register_forward_hook(lambda layer, args, out: (out[0].flip(-1), *out[1:]))
        else:
            gate.weight.data.copy_(gate.weight.data.flip(0))

    def preempted(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not computed:
            turn({one: one.num_computed_tokens for one in (*self.running, request)})
        return preempt(self, request, *args, **kwargs)

    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(len(self.running))
        if len(steps) == 12:
            turn({one: one.num_tokens - 1 for one in self.running})
            rollout._forget_prefixes()
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

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_preempt_request", preempted)
        assert wrong(0, 6, before=0) <= MOST
    assert sum(before > 28 for before in computed.values()) >= 2  # log-probs, too, are of before
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "schedule", held)
        assert wrong(6, 2, before=1) <= MOST
    assert steps[11] == 2
    assert min(list(computed.values())[-2:]) > 28
    rollout.close()


class SecondRunner:
    """As vLLM's second model runner: what `TokenStore` looks at of it, and steps in which token t of a request goes to the experts
    `expert` + layer + t and `expert` + layer in layers 1 and 3, and what is drawn from it has the log-prob -`expert` - t."""

    def __init__(self) -> None:
        self.device, self.max_num_tokens = torch.device("cpu"), 32
        self.kv_cache_config = SimpleNamespace(num_blocks=12)
        self.req_states = SimpleNamespace(req_id_to_index={}, num_computed_tokens_np=np.zeros(4, np.int64))
        table = SimpleNamespace(gpu=torch.zeros(4, 8, dtype=torch.int32))
        self.block_tables = SimpleNamespace(
            block_sizes=[1, 2],
            block_tables=[None, table],
            slot_mappings=torch.zeros(2, 32, dtype=torch.int64),
        )
        self.store = TokenStore(self, 1)
        self._write = self.store.routers([3, 1], experts=64, top_k=2)

    def step(
        self,
        tokens: dict[str, tuple[int, int]],
        expert: int,
        *,
        new: dict[str, tuple[list[int], int]] | None = None,
        gone: tuple[str, ...] = (),
        lost: tuple[str, ...] = (),
        asked: bool = True,
    ) -> None:
        """tokens: first and count by request; new: blocks and tokens known of requests that get a place."""
        states, tables = self.req_states, self.block_tables
        params = SimpleNamespace(extra_args=ASKS if asked else None)
        told = [
            SimpleNamespace(
                req_id=name, sampling_params=params, prefill_token_ids=[0] * known, prompt_token_ids=[0] * 3
            )
            for name, (_, known) in (new or {}).items()
        ]
        self.store.begin_step(
            SimpleNamespace(finished_req_ids=set(gone), preempted_req_ids=set(lost), scheduled_new_reqs=told)
        )
        for name in (*gone, *lost):
            states.req_id_to_index.pop(name, None)
        for name, (blocks, _) in (new or {}).items():
            at = next(n for n in range(4) if n not in states.req_id_to_index.values())
            states.req_id_to_index[name], states.num_computed_tokens_np[at] = at, 0
            tables.block_tables[1].gpu[at, : len(blocks)] = torch.tensor(blocks)
        row, last = 0, []
        chosen = torch.zeros(32, 2, dtype=torch.int32)
        for name, (first, count) in tokens.items():
            at = states.req_id_to_index[name]
            for t in range(first, first + count):
                block = tables.block_tables[1].gpu[at, t // 2]
                tables.slot_mappings[1, row] = 2 * block + t % 2
                chosen[row] = torch.tensor([expert + t, expert])
                row += 1
            states.num_computed_tokens_np[at] = first + count
            last.append((row - 1, -float(expert + first + count - 1)))
        tables.slot_mappings[1, row:] = -1
        for layer, write in self._write.items():
            write(chosen[: row + 1] + layer)  # captured graphs have more rows than a step has tokens
        self.store.end_forward(row)
        rows, logprobs = zip(*last, strict=True)
        self.store.end_draw(torch.tensor(rows), torch.tensor(logprobs))


def test_what_is_told_of_tokens_lies_where_their_keys_do() -> None:
    """Two requests in turns; one begins with two tokens of the other's that the prefix cache has."""
    runner = SecondRunner()
    runner.step({"a-x": (0, 3)}, 10, new={"a-x": ([5, 7], 3)})
    runner.step({"b-y": (2, 1), "a-x": (3, 1)}, 20, new={"b-y": ([5, 2], 3)})
    runner.step({"b-y": (3, 1), "a-x": (4, 1)}, 30)
    told = runner.store.take(["b", "never"])
    assert list(told) == ["b"]
    routes, logprobs = told["b"]["routes"], told["b"]["logprobs"]
    assert (routes.shape, routes.dtype, logprobs.dtype) == ((4, 2, 2), np.uint8, np.float32)
    assert routes[:, 0].tolist() == [[11, 11], [12, 11], [23, 21], [34, 31]]
    assert (routes[:, 1] == routes[:, 0] + 2).all()
    made = completed(Answer([1, 2], [], "stop"), told["b"], 3)
    assert (made.logprobs, made.routes is routes) == ([-22, -33], True)
    given_up = completed(Answer([1], [], "abort"), told["b"], 3)
    assert (given_up.logprobs, given_up.routes) == ([-22], None)
    # The other ends, and its places are another's before anybody asks.
    runner.step({"c-z": (0, 2)}, 40, new={"c-z": ([5], 2)}, gone=("a-x", "b-y"))
    told = runner.store.take(["a", "b"])
    assert told["a"]["routes"][:, 0, 1].tolist() == [11, 11, 11, 21, 31]
    assert told["a"]["logprobs"][2:].tolist() == [-12, -23, -34]
    assert runner.store.take(["a"]) == {}


def test_a_request_keeps_what_is_told_of_its_first_forward() -> None:
    """It loses its place twice, the second time before it is read as far as it was; another takes its slots. Of a token that was drawn
    and thrown away, what it was drawn from is told of the forward that drew it anew."""
    runner = SecondRunner()
    runner.step({"a-x": (0, 3)}, 10, new={"a-x": ([1, 2], 3)})
    runner.step({"a-x": (3, 1)}, 20)
    runner.step({"b-y": (0, 4)}, 50, new={"b-y": ([1, 2], 4)}, lost=("a-x",))
    runner.step({"a-x": (0, 2)}, 30, new={"a-x": ([3, 4, 6], 5)})
    runner.step({"b-y": (4, 1)}, 60, lost=("a-x",))
    runner.step({"a-x": (0, 5)}, 40, new={"a-x": ([3, 4, 6], 5)})
    runner.store.keep()  # all are about to be read anew
    runner.store.release()
    # Token 4 was computed, and what it drew was thrown away: there are five tokens still.
    runner.step({"a-x": (0, 5)}, 20, new={"a-x": ([8, 9, 10], 5)})
    runner.step({"a-x": (5, 1)}, 30)
    told = runner.store.take(["a"])["a"]
    assert told["routes"][:, 0, 1].tolist() == [11, 11, 11, 21, 21, 31]
    assert told["logprobs"][2:].tolist() == [-12, -23, -24, -35]
    runner.step({"b-y": (5, 1)}, 60, gone=("a-x",))
    assert runner.store.take(["a"]) == {}
    assert "a" not in runner.store._first


def test_what_is_read_anew_before_anything_was_drawn_is_of_the_second_time() -> None:
    runner = SecondRunner()
    runner.step({"a-x": (0, 2)}, 10, new={"a-x": ([1, 2], 3)})
    runner.step({"b-y": (0, 3)}, 50, new={"b-y": ([3, 4], 3)}, lost=("a-x",))
    runner.step({"a-x": (0, 3)}, 20, new={"a-x": ([5, 6], 3)})
    told = runner.store.take(["a"])["a"]
    assert told["routes"][:, 0, 1].tolist() == [21, 21, 21]
    assert told["logprobs"][2] == -22


def test_who_asks_for_nothing_costs_no_copy() -> None:
    runner = SecondRunner()
    runner.step({"a-x": (0, 3)}, 10, new={"a-x": ([1, 2], 3)}, asked=False)
    runner.step({"b-y": (0, 1)}, 10, new={"b-y": ([3], 1)}, gone=("a-x",), asked=False)
    assert not runner.store._ended
    assert not runner.store._asked


def test_what_nobody_waits_for_is_forgotten() -> None:
    """One request that is done, one that ends with the next step, one that lost its place."""
    runner = SecondRunner()
    for place, name in enumerate("abc"):
        runner.step({f"{name}-x": (0, 3)}, 10, new={f"{name}-x": ([2 * place, 2 * place + 1], 3)})
    runner.step({"b-x": (3, 1)}, 20, gone=("a-x",), lost=("c-x",))
    assert (list(runner.store._ended), list(runner.store._first)) == (["a"], ["c"])
    runner.store.forget(["a", "b", "c", "never"])
    runner.step({"d-x": (0, 3)}, 30, new={"d-x": ([0, 1], 3)}, gone=("b-x", "c-x"))
    assert not runner.store._ended
    assert not runner.store._first
    assert runner.store.take(["a", "b", "c"]) == {}


def test_a_router_that_is_never_asked_is_named() -> None:
    with pytest.raises(QuintetError, match=r"no router of the layers \[1, 3\]"):
        SecondRunner().store.take([])


def test_what_is_told_travels_as_it_is() -> None:
    wire = RecordsByRequest()
    made = {
        f"q{n}": {
            "routes": np.arange(n * 6, dtype=np.uint8).reshape(n, 3, 2),
            "logprobs": np.arange(n, dtype=np.float32),
        }
        for n in range(3)
    }
    came = wire.load(wire.dump(made), "a worker")
    assert list(came) == list(made)
    for name, told in made.items():
        assert list(came[name]) == list(told)
        for what, one in told.items():
            assert np.array_equal(came[name][what], one)
            assert came[name][what].dtype == one.dtype
    assert wire.load(wire.dump({}), "a worker") == {}
    for broken in (wire.dump(made)[:-1], b"{", b'{"q": {"routes": ["object", [1]]}}\n12345678'):
        with pytest.raises(QuintetError, match="what came from a worker is not the records of tokens"):
            wire.load(broken, "a worker")


def trained_on(
    name: str, path: Path, ids: list[list[int]], prompt: int, told: list[Tensor]
) -> dict[str, Any]:
    """On one rank, log-probs of the responses' tokens by engines on the same weights: in fp32 with routes of its own, and with those
    that are told, which one in bf16 is told as well. And what this one says of the probe's tokens, as it is and with one expert turned
    round."""
    from quintet.data.batch import make_batch, tokens
    from quintet.engine.routes import BatchRoutes
    from quintet.packing.plan import RankCell

    batch = make_batch(ids, [prompt] * len(ids), routes=told)
    cells, on = [RankCell([n]) for n in range(len(ids))], tokens(batch, "loss_mask") > 0
    engines = {dtype: engine_of(Case(name, dtype=dtype), path, trained=False) for dtype in ("fp32", "bf16")}

    def logprobs(dtype: str, routes: Any) -> Tensor:
        return engines[dtype].forward(batch, cells, 1.0, routes).logprobs[on]

    replayed = {dtype: logprobs(dtype, BatchRoutes(batch["routes"])) for dtype in engines}
    probed = {"probe": engine_scores(engines["bf16"], sequences(VOCAB, 64, experts=True))}
    for shard in engines["bf16"].shard_map():
        if re.search(r"layers\.1\..*experts\.(2\.)?(down_proj|w2)", shard.name):
            shard.view.data.neg_()
    probed["other"] = engine_scores(engines["bf16"], sequences(VOCAB, 64, experts=True))
    return {"natural": logprobs("fp32", None)} | replayed | probed


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
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
    batch = SimpleNamespace(req_ids=["other-0", "a-0"], num_computed_tokens_cpu=[0, 0])
    runner = SimpleNamespace(input_batch=batch, query_start_loc=SimpleNamespace(np=[0, 1, 0]))
    asked = SimpleNamespace(extra_args=ASKS)
    runner.requests = {"other-0": SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None))}
    runner.requests["a-0"] = SimpleNamespace(sampling_params=asked)
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
    assert listener.take(["other"]) == {}
    routes = listener.take(["a"])["a"]["routes"][:7]
    assert routes[:, 0, 0].tolist() == [11, 11, 11, 11, 21, 31, 51]
    assert (routes[:, 1] == routes[:, 0] + 2).all()
    step(0, 2, 60)
    listener.forget(["a", "never"])
    assert listener.take(["a"]) == {}


def test_stages_of_vllm_tell_their_layers_one_after_another() -> None:
    def worker(first: int, layers: int) -> dict[str, dict[str, np.ndarray]]:
        return {"a": {"routes": np.arange(first, first + layers).reshape(1, layers, 1).repeat(3, 0)}}

    workers = [worker(0, 2), worker(0, 2), worker(2, 1), worker(2, 1)]
    assert of_all_layers(workers, tp=2)["a"]["routes"].tolist() == [[[0], [1], [2]]] * 3
    assert of_all_layers(workers[:2], tp=2) == workers[0]


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
