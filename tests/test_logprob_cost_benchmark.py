"""What log-probs cost in generation: quintet's vLLM beside itself without them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import rollout
from benchmarks.records import read_records, record, write_records
from benchmarks.rollout_silent import SilentVllm, silent_arguments
from benchmarks.rollout_work import cases_of
from quintet.recipe import schema
from quintet.rollout.base import Request, Sampling
from quintet.rollout.external_engine import Answer
from tests.benchmark_runs import benchmark
from tests.models.directory import write_model

PAIR = ["--only", "vllm", "vllm-silent"]


def test_the_cost_is_that_of_the_pair_of_calls_in_the_middle() -> None:
    """A host that is slow for one call of either side: by medians of sides the cost would be another."""
    args = rollout.arguments(PAIR)
    seconds = {"vllm": [[1.02, 4.0, 2.04], [1.0]], "vllm-silent": [[1.0, 1.0, 2.0], [2.0]]}
    first, tail = rollout.costs_of(args, seconds)
    assert (first["case"], first["metric"], first["unit"]) == (
        "qwen2.5-1.5b/1gpu/vllm",
        "logprob_cost",
        "fraction",
    )
    assert first["value"] == pytest.approx(1 - 1 / 1.02)
    assert (tail["case"], tail["value"]) == ("qwen2.5-1.5b/1gpu/long-tail/vllm", -1.0)
    assert rollout.costs_of(args, {"vllm": seconds["vllm"]}) == []


def test_what_is_kept_leaves_the_record_beside_vllm_alone(tmp_path, capsys) -> None:
    out = tmp_path / "rollout.json"
    kept = record("rollout", "qwen2.5-1.5b/1gpu/vllm", "tokens_per_second", 5.0, "tokens/s", baseline=4.0)
    write_records(out, [kept])
    args = rollout.arguments([*PAIR, "--out", str(out)])
    calls: Any = {"vllm": [[(1.02, 0.0)]] * 2, "vllm-silent": [[(1.0, 0.0)]] * 2}
    rollout.keep(args, calls, args.only)
    fixed, tail = (sum(map(sum, case.response_tokens())) for case in cases_of("qwen2.5-1.5b"))
    found = {(one["case"], one["metric"]): (one["value"], one["baseline"]) for one in read_records(out)}
    cost = pytest.approx(1 - 1 / 1.02), None
    assert found == {
        ("qwen2.5-1.5b/1gpu/vllm", "tokens_per_second"): (5.0, 4.0),
        ("qwen2.5-1.5b/1gpu/vllm-silent", "tokens_per_second"): (fixed, fixed / 1.02),
        ("qwen2.5-1.5b/1gpu/long-tail/vllm-silent", "tokens_per_second"): (tail, tail / 1.02),
        ("qwen2.5-1.5b/1gpu/vllm", "logprob_cost"): cost,
        ("qwen2.5-1.5b/1gpu/long-tail/vllm", "logprob_cost"): cost,
    }
    assert "qwen2.5-1.5b/1gpu/vllm: log-probs cost 2.0% (aim: 3%, reached)" in capsys.readouterr().out
    rollout.keep(args, calls | {"bare": calls["vllm"]}, [*args.only, "bare"])
    (beside,) = (one for one in read_records(out) if one["case"] == kept["case"] and one["baseline"])
    assert beside["baseline"] == fixed / 1.02


def test_two_sides_share_a_gpu_call_by_call() -> None:
    assert rollout.arguments(PAIR).memory_fraction == 0.5
    assert rollout.arguments([*PAIR, "--call-by-call"]).memory_fraction == 0.4
    assert rollout.arguments([*PAIR, "--call-by-call", "--memory-fraction", "0.3"]).memory_fraction == 0.3


@pytest.mark.parametrize(
    "words", ["--only vllm", "--only vllm bare native", "--gpus 2", "--turns 2", "--shape laptop"]
)
def test_what_cannot_take_turns_call_by_call_is_refused(words: str, capsys) -> None:
    with pytest.raises(SystemExit):
        rollout.arguments([*words.split(), "--call-by-call"])
    assert "--call-by-call is of two sides on one GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("side", "told"), [("vllm-silent", 0), ("vllm", 1)])
def test_a_silent_side_that_tells_log_probs_is_refused_and_so_is_another_that_tells_none(
    side: str, told: int
) -> None:
    (case, _) = cases_of("tiny")

    def generate(requests: list[Request], sampling: Sampling) -> Any:
        return [
            [
                SimpleNamespace(response_ids=[1] * n, policy_logprobs=[0.0] * n * told)
                for n in one.limits(sampling)
            ]
            for one in requests
        ]

    rollout.one_round(SimpleNamespace(generate=generate), case, 128, 0, side)
    told = 1 - told
    with pytest.raises(SystemExit, match="without a log-prob for each token"):
        rollout.one_round(SimpleNamespace(generate=generate), case, 128, 0, side)


class Engine:
    """vLLM's engine: what it was asked. Workers are asked nothing."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.asked = arguments, list[dict[str, Any]]()

    def run(self, jobs):
        self.asked += [job.parameters for job in jobs]
        yield {at: Answer([7] * job.parameters["max_tokens"], [], "length") for at, job in enumerate(jobs)}


@pytest.mark.parametrize("worker", [{"worker_cls": "quintet's"}, {}])
def test_log_probs_are_neither_asked_for_nor_fetched(tmp_path, monkeypatch, worker: dict[str, str]) -> None:
    arguments = {"tensor_parallel_size": 1, "max_num_seqs": 4} | worker
    monkeypatch.setattr("benchmarks.rollout_silent.engine_arguments", lambda *_: dict(arguments))
    monkeypatch.setattr("quintet.rollout.vllm.rollout.OfflineEngine", Engine)
    for needless in ("prepare", "require"):
        monkeypatch.setattr(f"quintet.rollout.vllm.compat.{needless}", lambda *_: "")
    recipe = schema.Recipe.model_validate(
        {"data": {"max_prompt_tokens": 8}, "rollout": {"backend": "vllm", "max_response_tokens": 8}}
    )
    made = SilentVllm(recipe, write_model(tmp_path), device="cpu", decode=str)
    ((one, two),) = made.generate([Request([1, 2], 2)], Sampling(max_response_tokens=3, ignore_end=True))
    assert (one.response_ids, one.policy_logprobs, one.finish) == ([7] * 3, [], "length")
    assert one.finished <= two.finished
    engine: Any = made._engine
    ours = {"worker_cls": "benchmarks.rollout_silent_worker.SilentWorker"} if worker else {}
    assert engine.arguments == arguments | ours
    assert [(one["logprobs"], one["flat_logprobs"], "extra_args" in one) for one in engine.asked] == [
        (None, False, False)
    ] * 2


def test_the_worker_is_named_only_in_place_of_another(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.rollout_silent.engine_arguments", lambda: {"seed": 1})
    assert silent_arguments() == {"seed": 1}


@pytest.mark.vllm
@pytest.mark.parametrize("silent", [False, True])
def test_the_worker_takes_no_log_probs_and_schedules_as_quintets(monkeypatch, silent: bool) -> None:
    """With a runner whose draw is written down: a GPU's worker, on a CPU."""
    from vllm.v1.worker.gpu_worker import Worker

    from benchmarks.rollout_silent_worker import SilentWorker
    from quintet.rollout.vllm import gpu_worker

    log: list[str] = []

    class Sampler:
        logprobs_mode = "raw_logprobs"

        def sample(self, logits):
            log.append("drawn")
            return logits, logits

        def apply_staged_writes(self):
            log.append("written")

    class Runner:
        sampler = Sampler()

        def sample(self, hidden, batch, grammar):
            return self.sampler.sample(hidden)

    monkeypatch.setattr(Worker, "initialize_from_config", lambda self, config: None)
    store = SimpleNamespace(end_draw=lambda *_: log.append("stored"))
    monkeypatch.setattr(gpu_worker, "store_of", lambda *_, **__: store)
    monkeypatch.setattr(gpu_worker, "log_probs_of", lambda *_: log.append("log-probs"))
    worker: Any = object.__new__(SilentWorker if silent else gpu_worker.StoringWorker)
    worker.model_runner, worker.rank = Runner(), 0
    worker.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    worker.vllm_config = SimpleNamespace(additional_config={})
    worker.initialize_from_config(SimpleNamespace(kv_cache_groups=[]))
    worker.model_runner.sample("logits", SimpleNamespace(logits_indices=None), None)
    assert log == (["drawn"] if silent else ["drawn", "log-probs", "stored"])
    worker._more = False
    worker.model_runner.sampler.apply_staged_writes()
    assert "written" not in log  # quintet's, which has nothing to do with log-probs, stays


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.parametrize("how", [[], ["--call-by-call"]])
def test_the_cost_of_log_probs_is_measured_on_a_cpu(how: list[str]) -> None:
    printed = benchmark("rollout", "--tiny", "--rounds", "1", *PAIR, *how)
    for case in ("", "long-tail/"):
        told = rf"^tiny/1gpu/{case}vllm: log-probs cost -?[\d.]+% \(aim: 3%, (reached|missed)\)$"
        assert re.search(told, printed, re.MULTILINE), printed
