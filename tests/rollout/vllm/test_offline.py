"""vLLM's synchronous engine says what transformers says, and does what it is asked."""

from __future__ import annotations

import dataclasses

import pytest

from quintet.data.tokenizer import build_char_tokenizer, load_tokenizer
from quintet.errors import UserError
from quintet.recipe.reserved_options import declared_fields
from quintet.rollout.base import Request, Sampling
from quintet.rollout.vllm import compat
from tests.rollout.prompts import PROMPTS
from tests.rollout.test_native import generate
from tests.rollout.vllm.conftest import DEVICE, TOLERANCE
from tests.rollout.vllm.greedy import greedy_by_transformers, logprobs_by_transformers
from tests.rollout.vllm.models import save

pytestmark = pytest.mark.vllm

ALPHABET = "".join(chr(ord("0") + k) for k in range(58))  # with pad, end and unknown, the models' 61 tokens


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # As many positions as the recipe's longest sample has tokens.
    path = save("qwen3", tmp_path_factory.mktemp("qwen3"), max_position_embeddings=64)
    build_char_tokenizer(ALPHABET, path)
    return path


@pytest.fixture(scope="module")
def rollout(start, path):
    made = start("qwen3", path, stop=["never"])  # a rollout with stop strings reads the tokenizer
    tokenizer = load_tokenizer(path)
    made._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    return made


def test_greedy_equals_transformers(rollout):
    rows = rollout.generate([Request(p) for p in PROMPTS], Sampling(temperature=0, max_response_tokens=8))
    expected = greedy_by_transformers("qwen3", 8)
    for prompt, (sample,), ids in zip(PROMPTS, rows, expected, strict=True):
        assert sample.response_ids == ids
        told = logprobs_by_transformers("qwen3", prompt + ids)[len(prompt) - 1 :]
        assert sample.policy_logprobs == pytest.approx(told, abs=TOLERANCE)
        assert sample.raw_logprobs == sample.policy_logprobs
        assert sample.logprobs == [0.0] * 8
        assert sample.finish == "length"


def test_score_is_what_was_told(rollout):
    (row,) = rollout.generate([Request([5, 9, 2], samples=3, seed=3)], Sampling(max_response_tokens=10))
    scored = rollout.score([[5, 9, 2, *s.response_ids] for s in row] + [[7], [7, 8]])
    for sample, logprobs in zip(row, scored[:3], strict=True):
        assert logprobs[2:] == pytest.approx(sample.raw_logprobs, abs=TOLERANCE)
        assert logprobs == pytest.approx(
            logprobs_by_transformers("qwen3", [5, 9, 2, *sample.response_ids]), abs=TOLERANCE
        )
    assert [len(s) for s in scored] == [12, 12, 12, 0, 1]
    longest = rollout.score([[k % 61 for k in range(64)]])
    assert len(longest[0]) == 63
    with pytest.raises(UserError, match=r"sequence 1 has 65 tokens.*data\.max_prompt_tokens"):
        rollout.score([[1, 2], [1] * 65])


def test_seeds_tell_samples_apart_and_bring_them_back(rollout):
    sampling = Sampling(max_response_tokens=6)
    (row,) = rollout.generate([Request([5, 9], samples=6, seed=4)], sampling)
    assert len({tuple(s.response_ids) for s in row}) == 6
    again, other = rollout.generate(
        [Request([5, 9], samples=3, seed=4), Request([5, 9], samples=3, seed=5)], sampling
    )
    assert [s.response_ids for s in again] == [s.response_ids for s in row[:3]]
    assert all(a.response_ids != b.response_ids for a, b in zip(again, other, strict=True))


def test_each_sample_has_a_limit_of_its_own(rollout):
    (row,) = rollout.generate([Request([5], samples=3, max_response_tokens=(1, 7, 32))], Sampling())
    assert [len(s.response_ids) for s in row] == [1, 7, 32]


def test_a_stop_token_ends_a_response_and_is_part_of_it(rollout):
    (ids,) = greedy_by_transformers("qwen3", 8)[:1]
    asked = Sampling(temperature=0, max_response_tokens=8, stop_token_ids=(ids[3],))
    ((sample,),) = rollout.generate([Request(PROMPTS[0])], asked)
    assert sample.response_ids == ids[: ids.index(ids[3]) + 1]
    assert sample.finish == "stop"
    ((on,),) = rollout.generate(
        [Request(PROMPTS[0])],
        Sampling(temperature=0, max_response_tokens=8, stop_token_ids=(ids[3],), ignore_end=True),
    )
    assert on.response_ids == ids
    assert on.finish == "length"


def test_a_stop_string_ends_a_response_and_is_cut_from_its_text(rollout):
    (ids,) = greedy_by_transformers("qwen3", 8)[:1]
    whole = rollout._decode(ids)
    stop = whole[2:4]
    asked = Sampling(temperature=0, max_response_tokens=8, stop=(stop,))
    ((sample,),) = rollout.generate([Request(PROMPTS[0])], asked)
    assert sample.response_ids == ids[: len(sample.response_ids)]
    assert rollout._decode(sample.response_ids).endswith(stop)
    assert sample.text == whole.split(stop)[0]
    assert sample.finish == "stop"
    assert len(sample.policy_logprobs) == len(sample.response_ids)


def test_cut_sampling_keeps_the_policys_log_probs(rollout):
    """At temperature 1 the policy's log-probs are the model's own; those sampled under cannot be told."""
    for cut in ({"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.4}):
        (row,) = rollout.generate(
            [Request([5, 9, 2], samples=3, seed=3)], Sampling(max_response_tokens=6, **cut)
        )
        for sample in row:
            told = logprobs_by_transformers("qwen3", [5, 9, 2, *sample.response_ids])[2:]
            assert sample.policy_logprobs == pytest.approx(told, abs=TOLERANCE)
            assert sample.logprobs is None
    ((one,),) = rollout.generate([Request(PROMPTS[0])], Sampling(top_k=1, max_response_tokens=8))
    assert one.response_ids == greedy_by_transformers("qwen3", 8)[0]


@pytest.mark.parametrize(
    ("request_", "sampling", "said"),
    [
        (Request([]), Sampling(max_response_tokens=4), "prompt 0 has no tokens"),
        (
            Request([1] * 34),
            Sampling(max_response_tokens=32),
            "prompt 0 has 34 tokens and its response may have 32",
        ),
        (
            Request([1]),
            Sampling(max_response_tokens=0),
            "prompt 0 has a response of 0 tokens: one has at least 1",
        ),
        (Request([1]), Sampling(temperature=0.5), "at temperature 0.5.*an engine made for raw_logprobs"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(rollout, request_, sampling, said):
    with pytest.raises(UserError, match=said):
        rollout.generate([request_], sampling)
    assert rollout.generate([Request([1])], Sampling(max_response_tokens=1))[0][0].finish == "length"


def test_the_prefix_cache_is_used_and_counted(rollout):
    prompt = [k % 60 for k in range(32)]
    rollout.metrics()
    rollout.generate([Request(prompt, samples=4)], Sampling(max_response_tokens=2))
    counted = rollout.metrics()
    assert counted["prefix_cache_queries"] >= 4 * 32
    assert counted["drafts"] == 0
    assert rollout.metrics()["prefix_cache_queries"] == 0


def test_stop_strings_need_a_rollout_with_stop_strings(start, path):
    # On a GPU, one vLLM a process can sleep.
    mode = "offline" if DEVICE == "cpu" else "server"
    made = start("qwen3", path, mode=mode, temperature=0.7, vllm={"max_num_batched_tokens": 65})
    with pytest.raises(UserError, match=r"stop strings.*rollout\.stop"):
        made.generate([Request([1])], Sampling(temperature=0.7, stop=("a",)))
    # And while it is there: at another temperature than 1 the policy's log-probs are those of the scaled logits.
    (row,) = made.generate([Request([5, 9], samples=2)], Sampling(temperature=0.7, max_response_tokens=5))
    for sample in row:
        told = logprobs_by_transformers("qwen3", [5, 9, *sample.response_ids], temperature=0.7)[1:]
        assert sample.policy_logprobs == pytest.approx(told, abs=TOLERANCE)
        assert sample.logprobs == sample.policy_logprobs
        assert sample.raw_logprobs is None
    ((greedy,),) = made.generate([Request(PROMPTS[0])], Sampling(temperature=0, max_response_tokens=8))
    assert greedy.response_ids == greedy_by_transformers("qwen3", 8)[0]
    told = logprobs_by_transformers("qwen3", PROMPTS[0] + greedy.response_ids)[2:]
    assert greedy.policy_logprobs == pytest.approx(told, abs=TOLERANCE)
    with pytest.raises(UserError, match="cut only at temperature 1"):
        made.generate([Request([1])], Sampling(temperature=0.7, top_p=0.5))
    # And prompts that do not all fit in a step, of samples with seeds, wait for the next.
    prompts = [[at, *range(30)] for at in range(7)]
    together = made.generate(
        [Request(p, seed=3) for p in prompts], Sampling(temperature=0.7, max_response_tokens=8)
    )
    alone = made.generate([Request(prompts[4], seed=3)], Sampling(temperature=0.7, max_response_tokens=8))
    assert together[4][0].response_ids == alone[0][0].response_ids


def test_options_that_are_read_from_the_source_are_those_there_are():
    compat.prepare(DEVICE)
    from vllm.engine.arg_utils import EngineArgs

    known = {one.name for one in dataclasses.fields(EngineArgs)}
    assert declared_fields("vllm", "engine/arg_utils.py", "EngineArgs") == known


def test_unknown_options_name_the_near_one(start, path):
    with pytest.raises(
        UserError, match=r"rollout\.vllm\.enforce_eagr: the EngineArgs of vLLM .* did you mean enforce_eager"
    ):
        start("qwen3", path, vllm={"enforce_eagr": True})
    with pytest.raises(UserError, match=r"rollout\.vllm\.seed: each request has its own"):
        start("qwen3", path, vllm={"seed": 3})


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU, one vLLM a process can sleep")
def test_a_format_that_vllm_does_not_know_is_a_sentence(start, path):
    with pytest.raises(UserError, match=r"vLLM .* cannot start as the recipe asks: .*`foo` is not supported"):
        start("qwen3", path, vllm={"load_format": "foo"})


@pytest.mark.skipif(DEVICE == "cpu", reason="vLLM for CPU has no second runner, whose noise it is")
def test_native_draws_the_same_tokens(pool, start, tmp_path):
    """In fp32: of a request the tokens of one back end are those of the other."""
    path = save("qwen3", tmp_path)
    requests = [Request(p, samples=16, seed=n - 2) for n, p in enumerate(PROMPTS)]
    sampling = Sampling(max_response_tokens=24)
    theirs = start("qwen3", path, mode="server", dtype="fp32").generate(requests, sampling)
    ((ours,),) = pool.run(generate, 1, path, {}, [(requests, sampling, 16)])
    drawn = [[s.response_ids for row in rows for s in row] for rows in (ours, theirs)]
    assert drawn[0] == drawn[1]
