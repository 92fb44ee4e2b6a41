"""SGLang itself, on a GPU: what it draws and tells, the weights it takes, its sleep and its death. `make test-gpu PART=sglang` runs it, in an
environment that has `.[sglang]`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from quintet.cli import main
from quintet.errors import QuintetError, WorkerFailure
from quintet.models.mcore import whole_box
from quintet.recipe import schema
from quintet.rollout.base import Piece, Request, Sampling
from quintet.rollout.native.sampler import draw
from quintet.rollout.seeds import sample_seeds
from quintet.rollout.sglang.rollout import SglangRollout
from quintet.runs.ledger import read_metrics

ROOT = Path(__file__).parents[3]
THERE = importlib.util.find_spec("sglang") is not None and torch.cuda.is_available()
pytestmark = [
    pytest.mark.skipif(not THERE, reason="needs SGLang and a GPU"),
    pytest.mark.timeout(600),
]

OPTIONS: dict[str, Any] = {
    "attention_backend": "triton",
    "cuda_graph_max_bs_decode": 16,
    "disable_prefill_cuda_graph": True,
}
"""Few graphs to capture, and kernels that any card compiles."""
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.04,
}
LARGEST, MEAN = 0.25, 0.05
"""Of log-probs against transformers' in fp32: SGLang computes in bf16."""
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [101, 7, 55, 200, 31, 8, 64, 4, 90, 17]]
ASKED = [Request(prompt, samples=2, seed=3 + at) for at, prompt in enumerate(PROMPTS)]
SHORT, LONG = 24, 600


@cache
def weights(seed: int) -> Any:
    """A random model in transformers, in fp32; its weights are of bf16. Seed 0's are on disk, 1's are new."""
    config = Qwen2Config(**SIZES, tie_word_embeddings=False)
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return made.to(torch.bfloat16).to(torch.float32).eval()


def distributions(seed: int, ids: Sequence[int], first: int, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of all tokens at each place from the first on."""
    with torch.no_grad():
        logits = weights(seed)(torch.tensor([ids])).logits[0, first - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def logprobs(seed: int, ids: Sequence[int], first: int, temperature: float = 1.0) -> torch.Tensor:
    """Of the tokens from the first on."""
    chosen = torch.tensor(ids[first:])[:, None]
    return distributions(seed, ids, first, temperature).gather(1, chosen)[:, 0]


class Source:
    """Weights as what a sync brings. breaks: at which piece it fails."""

    def __init__(self, seed: int, breaks: int | None = None) -> None:
        self.seed, self.breaks = seed, breaks

    def batches(self, receiver: Any) -> Iterator[list[Piece]]:
        for at, (name, tensor) in enumerate(weights(self.seed).state_dict().items()):
            if at == self.breaks:
                raise RuntimeError("broken off")
            passing = tensor.to("cuda", torch.bfloat16)
            yield [Piece(name, tuple(tensor.shape), whole_box(tuple(tensor.shape)), passing)]
            passing.zero_()  # its memory is the next piece's


def made(directory: Path, **rollout: Any) -> SglangRollout:
    sizes = {"backend": "sglang", "max_response_tokens": LONG, "sequences_per_rank": 32}
    sizes |= {"memory_fraction": 0.1, "bucket_mib": 1, "sglang": OPTIONS}
    settings = schema.Rollout(**(sizes | rollout))
    recipe = schema.Recipe(data=schema.Data(max_prompt_tokens=256), rollout=settings)
    return SglangRollout(recipe, directory, device="cuda", decode=str)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    weights(0).to(torch.bfloat16).save_pretrained(path)
    weights(0).to(torch.float32)
    return path


@pytest.fixture(scope="module")
def rollout(directory: Path) -> Iterator[SglangRollout]:
    one = made(directory, sleep_level=1)
    yield one
    one.close()


@pytest.fixture
def old(rollout: SglangRollout) -> SglangRollout:
    """It is awake and has seed 0's weights, whatever a test before has left."""
    rollout.wake("weights")
    rollout.update_weights(Source(0))
    rollout.wake("kv_cache")
    return rollout


def short(**sampling: Any) -> Sampling:
    return Sampling(max_response_tokens=SHORT, ignore_end=True, **sampling)


def check(rows: Sequence[Sequence[Any]], seed: int, temperature: float = 1.0) -> None:
    """What it told is what these weights say, and what other weights say is far from it."""
    apart, of_others = [], []
    for prompt, row in zip(PROMPTS, rows, strict=False):
        for one in row:
            told = torch.tensor(one.policy_logprobs)
            for found, which in ((apart, seed), (of_others, 1 - seed)):
                right = logprobs(which, [*prompt, *one.response_ids], len(prompt), temperature)
                found.append((told - right).abs())
    ours, theirs = torch.cat(apart), torch.cat(of_others)
    assert float(ours.mean()) < MEAN
    assert float(ours.max()) < LARGEST
    assert float(theirs.mean()) > 10 * MEAN


def ids(rows: Sequence[Sequence[Any]]) -> list[list[list[int]]]:
    return [[one.response_ids for one in row] for row in rows]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5}], ids=str
)
def test_log_probs_are_those_of_transformers(old, sampling):
    check(old.generate(ASKED, short(**sampling)), 0, sampling.get("temperature", 1.0))


def test_greedy_takes_the_best(old):
    rows = old.generate(ASKED, short(temperature=0.0))
    check(rows, 0)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        for one in row:
            best = distributions(0, [*prompt, *one.response_ids], len(prompt)).amax(-1)
            assert float((best - torch.tensor(one.policy_logprobs)).max()) < LARGEST


def test_seeds_draw_the_same_again_and_alone(old):
    first, again = (old.generate(ASKED, short()) for _ in range(2))
    assert ids(first) == ids(again)
    assert ids(old.generate(ASKED[:1], short())) == ids(first[:1])
    assert all(row[0].response_ids != row[1].response_ids for row in first)


def test_it_draws_with_quintets_noise(old):
    """Where rounding decides, the token is another; without the noise hardly one would be the same."""
    same: list[bool] = []
    for request, row in zip(ASKED, old.generate(ASKED, short()), strict=True):
        for seed, one in zip(sample_seeds(request.seed, request.samples), row, strict=True):
            first = len(request.prompt_ids)
            logits = distributions(0, [*request.prompt_ids, *one.response_ids], first)
            positions = torch.arange(SHORT) + first - 1
            tokens, *_ = draw(logits, Sampling(), torch.full((SHORT,), seed), positions)
            same += (tokens == torch.tensor(one.response_ids)).tolist()
    assert sum(same) > 0.8 * len(same)


def test_each_sample_has_a_limit_of_its_own(old):
    asked = [
        Request(prompt, samples=2, seed=at, max_response_tokens=(4, 9 + at))
        for at, prompt in enumerate(PROMPTS)
    ]
    rows = old.generate(asked, short())
    assert [[len(one) for one in row] for row in ids(rows)] == [[4, 9], [4, 10], [4, 11]]


def test_prefixes_that_are_known_are_counted(old):
    old.generate(ASKED, short())
    old.metrics()  # which begins to count anew
    old.generate(ASKED, short())
    told = old.metrics()
    assert told["prefix_cache_queries"] == 2 * sum(map(len, PROMPTS))
    assert told["prefix_cache_hits"] > 0


def test_a_stop_token_ends_a_response(old):
    (row,) = old.generate(ASKED[:1], short(temperature=0.0))
    end = row[0].response_ids[5]
    sampling = Sampling(temperature=0.0, max_response_tokens=SHORT, stop_token_ids=(end,))
    (stopped,) = old.generate(ASKED[:1], sampling)
    assert stopped[0].finish == "stop"
    assert stopped[0].response_ids[-1] == end


def test_scores_are_those_of_transformers(old):
    rows = old.generate(ASKED, short())
    sequences = [prompt + row[0].response_ids for prompt, row in zip(PROMPTS, rows, strict=True)]
    for sequence, scores in zip(sequences, old.score(sequences), strict=True):
        assert float((torch.tensor(scores) - logprobs(0, sequence, 1)).abs().max()) < LARGEST


def test_new_weights_are_what_generates(old):
    old.update_weights(Source(1))
    check(old.generate(ASKED, short()), 1)


def test_a_sync_gives_its_memory_back(old, monkeypatch):
    old.update_weights(Source(0))
    before = torch.cuda.memory_reserved()
    monkeypatch.setattr(old, "_recipe", old._recipe.model_copy(update={"bucket_mib": 64}))
    old.update_weights(Source(0))
    assert torch.cuda.memory_reserved() <= before


def test_weights_that_came_in_part_are_not_used(old):
    with pytest.raises(RuntimeError, match="broken off"):
        old.update_weights(Source(1, breaks=7))
    with pytest.raises(QuintetError, match="weights are undefined"):
        old.generate(ASKED, short())
    old.update_weights(Source(1))
    check(old.generate(ASKED, short()), 1)


def freed(rollout: SglangRollout, level: int) -> int:
    """Bytes of the device that sleep gives back."""
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    rollout.sleep(level)
    return torch.cuda.mem_get_info()[0] - before


def test_sleep_gives_memory_back_and_keeps_weights(old):
    known = ids(old.generate(ASKED, short(temperature=0.0)))
    assert freed(old, 1) > 1 << 30
    with pytest.raises(QuintetError, match="asleep"):
        old.generate(ASKED, short())
    old.wake("weights")
    old.wake("kv_cache")
    assert ids(old.generate(ASKED, short(temperature=0.0))) == known


def test_requests_under_way_outlast_a_sync(old):
    """Pause, sleep, weights, KV cache, resume, as in a step; the weights are the same, so that all tokens are theirs."""
    long = Sampling(max_response_tokens=LONG, ignore_end=True)
    with ThreadPoolExecutor() as threads:
        rows = threads.submit(old.generate, ASKED, long)
        time.sleep(0.4)
        old.pause()
        assert not rows.done(), "they were to be under way"
        old.sleep(1)
        old.wake("weights")
        old.update_weights(Source(0))
        old.wake("kv_cache")
        old.resume()
        found = rows.result(timeout=240)
    assert all(len(one) == LONG for row in ids(found) for one in row)
    check(found, 0)


def test_what_is_aborted_has_the_tokens_it_came_to(old):
    with ThreadPoolExecutor() as threads:
        rows = threads.submit(old.generate, ASKED, Sampling(max_response_tokens=LONG, ignore_end=True))
        time.sleep(0.4)
        old.abort()
        found = rows.result(timeout=60)
    assert {one.finish for row in found for one in row} == {"abort"}
    assert all(0 < len(one) < LONG for row in ids(found) for one in row)
    check(found, 0)


def test_a_process_that_dies_is_named(old):
    """The last test of this rollout."""
    with ThreadPoolExecutor() as threads:
        rows = threads.submit(old.generate, ASKED, Sampling(max_response_tokens=LONG, ignore_end=True))
        time.sleep(0.4)
        os.kill(old._engine._engine.get_all_child_pids()[0], signal.SIGKILL)
        with pytest.raises(WorkerFailure, match=r"SGLang: sglang::scheduler .* died"):
            rows.result(timeout=60)


def test_weights_that_were_forgotten_come_anew(directory):
    one = made(directory, sleep_level=2)
    try:
        for _ in range(3):
            assert freed(one, 2) > 1 << 30
            one.wake("weights")
            one.update_weights(Source(1))
            one.wake("kv_cache")
            check(one.generate(ASKED, short()), 1)
    finally:
        one.close()


def test_a_run_trains_on_what_sglang_generates(tmp_path, capsys):
    sizes = [
        *("train.steps=2", "train.prompts_per_step=4", "train.eval_prompts=4", "optimizer.warmup_steps=1"),
        *("train.eval_samples_per_prompt=2", "rollout.samples_per_prompt=4", "sft=null", "model.dtype=bf16"),
        *("model.build.layers=2", "model.build.hidden_size=128", "model.build.head_dim=64"),
        *("model.build.heads=2", "model.build.kv_heads=2", "cluster.ranks=1", "cluster.device=cuda"),
        *("rollout.backend=sglang", "rollout.memory_fraction=0.1"),
        *("rollout.sequences_per_rank=16", "rollout.max_response_tokens=6"),
        *(f"rollout.sglang.{name}={json.dumps(value)}" for name, value in OPTIONS.items()),
    ]
    recipe = str(ROOT / "recipes" / "laptop_demo.yaml")
    assert main(["train", recipe, *sizes, f"run.dir={tmp_path}"]) == 0, capsys.readouterr()
    (run,) = tmp_path.iterdir()
    steps = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["sync/proof_seconds"] > 0
        assert line["mismatch/logprob_gap_max"] < LARGEST
