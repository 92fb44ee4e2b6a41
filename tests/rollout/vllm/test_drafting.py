"""A model that drafts for itself in vLLM: what comes out is what comes out without drafts, and drafts are of the weights of today."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.data.tokenizer import build_char_tokenizer, load_tokenizer
from quintet.errors import SyncMismatch, UserError
from quintet.rollout.base import Request, Sampling
from quintet.rollout.vllm import compat
from tests.rollout.prompts import PROMPTS
from tests.rollout.vllm import mimo
from tests.rollout.vllm.conftest import DEVICE, TOLERANCE
from tests.rollout.vllm.test_offline import ALPHABET
from tests.rollout.vllm.test_update import Source, sync
from tests.rollout.vllm.test_worker import DTYPE, differing

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

GREEDY = Sampling(temperature=0, max_response_tokens=25)
PROMPT = (5, 9, 2)
DRAWS = 4000
SURE = 0.001
"""Of a chi-square test: how improbable a deviation has to be."""


@pytest.fixture(scope="module", autouse=True)
def functions_travel() -> Iterator[None]:
    """These tests have workers run what changes things under quintet; it runs without that itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = mimo.save(tmp_path_factory.mktemp("mimo"))
    build_char_tokenizer(ALPHABET, path)
    return path


@pytest.fixture(scope="module")
def rollout(start: Any, path: Any) -> Any:
    # One with stop strings reads the tokenizer.
    made = start("mimo", path, empty=True, draft_tokens=1, stop=["never"])
    sync(made, Source(tensors()))
    tokenizer = load_tokenizer(path)
    made._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    return made


def responses(rollout: Any, sampling: Sampling = GREEDY) -> list[list[int]]:
    return [s.response_ids for (s,) in rollout.generate([Request(p) for p in PROMPTS], sampling)]


def accepted(rollout: Any) -> float:
    """The share of drafted tokens that is accepted in greedy responses."""
    rollout.metrics()
    responses(rollout)
    counts = rollout.metrics()
    assert counts["accepted_at_1"] == counts["accepted_tokens"]
    return counts["accepted_tokens"] / counts["draft_tokens"]


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """What an engine sends of the model: in the type that is generated in."""
    return {name: tensor.to(DTYPE) for name, tensor in mimo.tensors(seed).items()}


def greedy_by_transformers(tokens: int, seed: int = 0) -> list[list[int]]:
    rows = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(tokens):
            with torch.no_grad():
                ids.append(int(mimo.trunk(seed)(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        rows.append(ids[len(prompt) :])
    return rows


def test_greedy_tokens_are_those_without_drafts(rollout: Any) -> None:
    expected = greedy_by_transformers(25)
    assert responses(rollout) == expected
    assert accepted(rollout) > 0.3
    # Limits and stop tokens within an accepted run.
    for limit in range(1, 8):
        short = Sampling(temperature=0, max_response_tokens=limit)
        assert responses(rollout, short) == [row[:limit] for row in expected]
    for at in range(1, 8):
        stop = Sampling(temperature=0, max_response_tokens=25, stop_token_ids=(expected[0][at],))
        assert responses(rollout, stop)[0] == expected[0][: expected[0].index(expected[0][at]) + 1]


def test_stop_strings_end_a_response_within_an_accepted_run(rollout: Any) -> None:
    """Of one token and of two, wherever in a draft they end: a letter is a token here."""
    rollout.metrics()
    for prompt, ids in zip(PROMPTS, greedy_by_transformers(25), strict=True):
        letters = [rollout._decode([one]) for one in ids]
        for first, length in ((at, n) for at in range(8) for n in (1, 2)):
            stop = "".join(letters[first : first + length])
            if len(stop) != length:  # special tokens have no text
                continue
            asked = Sampling(temperature=0, max_response_tokens=25, stop=(stop,))
            ((sample,),) = rollout.generate([Request(prompt)], asked)
            end = next(n for n in range(1, 26) if stop in "".join(letters[:n]))
            assert sample.response_ids == ids[:end]
            assert (sample.text, sample.finish) == ("".join(letters[:end]).removesuffix(stop), "stop")
            assert len(sample.policy_logprobs) == end
    assert rollout.metrics()["accepted_tokens"] > 0


CUTS: list[dict[str, Any]] = [{"top_k": 4}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.9}]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, *CUTS], ids=str)
def test_log_probs_are_the_models(rollout: Any, how: dict[str, Any]) -> None:
    """One a token, also where tokens are cut off the distribution that is sampled from, or limits and stop tokens off a response."""
    end = (greedy_by_transformers(3)[0][2],)
    requests = [Request(p, samples=4, seed=3, max_response_tokens=(16, 1, 2, 3)) for p in PROMPTS]
    rows = rollout.generate(requests, Sampling(max_response_tokens=16, stop_token_ids=end, **how))
    for prompt, row in zip(PROMPTS, rows, strict=True):
        for sample in row:
            ids = torch.tensor([prompt + sample.response_ids])
            with torch.no_grad():
                logprobs = mimo.trunk()(input_ids=ids).logits[0, :-1].log_softmax(-1)
            told = logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].tolist()
            assert sample.policy_logprobs == pytest.approx(told, abs=TOLERANCE)
            assert sample.response_ids[-1:] == list(end) or sample.finish == "length"


def test_a_sample_depends_on_its_seed_and_on_nothing_beside_it(rollout: Any) -> None:
    """Each of the samples of a prompt has noise of its own, also of the draws that accept and replace."""
    asked = Sampling(max_response_tokens=12)

    def of(requests: list[Request]) -> list[list[list[int]]]:
        return [[s.response_ids for s in row] for row in rollout.generate(requests, asked)]

    together = of([Request(p, samples=8, seed=21 + n) for n, p in enumerate(PROMPTS)])
    assert len({tuple(ids) for ids in together[0]}) == 8
    assert of([Request(PROMPTS[2], samples=8, seed=23)]) == [together[2]]
    assert of([Request(PROMPTS[2], samples=3, seed=23), Request(PROMPTS[2], seed=99)])[0] == together[2][:3]
    assert of([Request(PROMPTS[2], samples=8, seed=24)]) != [together[2]]


def drawn(rollout: Any, draws: int, **cuts: Any) -> Tensor:
    """The first tokens [draws, 3] of responses at temperature 1."""
    asked = Sampling(max_response_tokens=3, **cuts)
    rows = rollout.generate([Request(list(PROMPT), samples=draws, seed=11)], asked)
    return torch.tensor([sample.response_ids for sample in rows[0]])


def p_value(tokens: Tensor, expected: Tensor) -> float:
    """How probable a deviation at least this large is (chi-square test; cells under 5 expected draws are one, and what cannot be
    drawn is none)."""
    counts = torch.bincount(tokens, minlength=mimo.VOCAB).double()
    want = expected * len(tokens)
    if counts[want == 0].any():
        return 0.0
    rare = torch.nonzero((want > 0) & (want < 5))[:, 0]
    cells = [cell for cell in (*torch.nonzero(want >= 5), rare) if len(cell)]
    counts, want = (torch.stack([one[cell].sum() for cell in cells]) for one in (counts, want))
    free = torch.tensor((len(want) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(free, ((counts - want) ** 2 / want).sum() / 2))


def p_values(rollout: Any, draws: int = DRAWS, **cuts: Any) -> list[float]:
    """Of the token after the prompt, which nothing drafts; of one that is drafted; and of one that may be either."""
    tokens = drawn(rollout, draws, **cuts)
    return [p_value(tokens[:, at], mimo.distribution(PROMPT, at, **cuts)) for at in range(3)]


@pytest.mark.parametrize(
    ("draws", "cuts"),
    [*((DRAWS, cuts) for cuts in ({}, *CUTS)), pytest.param(50_000, {}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_drafts_leave_the_distribution_as_it_is(rollout: Any, draws: int, cuts: dict[str, Any]) -> None:
    """Cut or not: a drafted token counts by its probability after the cuts."""
    rollout.metrics()
    found = p_values(rollout, draws, **cuts)
    counts = rollout.metrics()
    least = 0.05 if cuts else 0.15
    assert least < counts["accepted_tokens"] / counts["draft_tokens"] < 0.9  # both ways are looked at
    assert min(found) > SURE, found


@pytest.mark.skipif(DEVICE != "cpu", reason="the engine's process is this one")
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_cut_that_drafts_do_not_see_is_found(
    rollout: Any, monkeypatch: pytest.MonkeyPatch, cuts: dict[str, Any]
) -> None:
    """Drafted tokens count by their probability before it."""
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler, "apply_sampling_constraints", lambda logits, *asked: logits)
    assert p_values(rollout, **cuts)[1] < SURE


@pytest.mark.skipif(DEVICE != "cpu", reason="the engine's process is this one")
def test_a_bias_of_two_points_is_found(rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the probability of a drafted token, from the likeliest one to another."""
    from vllm.v1.sample import rejection_sampler

    right: Any = rejection_sampler.apply_sampling_constraints

    def biased(*args: Any) -> Tensor:
        p = right(*args).softmax(-1)
        largest = p.max(-1, keepdim=True)
        p.scatter_(-1, largest.indices, largest.values - 0.02)
        p[:, 17] += 0.02
        return p.log()

    monkeypatch.setattr(rejection_sampler, "apply_sampling_constraints", biased)
    assert p_values(rollout)[1] < SURE


@pytest.mark.skipif(DEVICE != "cpu", reason="of vLLM for CPU")
def test_vllm_for_cpu_alone_draws_from_another_distribution(
    rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what `compat` puts in place."""
    from vllm.v1.sample import rejection_sampler

    ours: Any = rejection_sampler.expand_batch_to_tokens
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", ours.__wrapped__)
    assert p_values(rollout)[1] < SURE


def test_new_weights_reach_the_drafter(rollout: Any) -> None:
    before = accepted(rollout)
    for seed in (1, 2):
        sync(rollout, Source(tensors(seed)))
        assert differing(rollout, tensors(seed)) == []
        if DEVICE == "cpu":
            assert responses(rollout) == greedy_by_transformers(25, seed)
        assert accepted(rollout) > 0.2
    sync(rollout, Source(tensors()))
    assert accepted(rollout) == before
    rollout.sleep(1)
    rollout.wake("weights")
    rollout.wake("kv_cache")
    assert accepted(rollout) == before


def test_what_the_drafter_does_not_get_is_named(rollout: Any) -> None:
    sent = tensors()
    del sent["model.mtp_layers.0.input_proj.weight"]
    with pytest.raises(SyncMismatch, match=r"did not get model\.mtp_layers\.0\.input_proj\.weight"):
        sync(rollout, Source(sent))
    sync(rollout, Source(tensors()))


@pytest.mark.skipif(DEVICE != "cpu", reason="the engine's process is this one")
def test_a_drafter_one_sync_behind_is_named(rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are loaded, and then those of the sync before are there again."""
    from quintet.rollout.vllm import worker

    sync(rollout, Source(tensors(1)))
    load: Callable[..., None] = worker.load_again
    old = [(n, t) for n, t in tensors(1).items() if ".mtp_layers." in n]

    def stale(loads: Any) -> None:
        policy, (drafter, drafts, config) = loads

        def taken() -> Iterator[tuple[str, Tensor]]:
            names = {name for name, _ in drafts}
            yield from ((n, t.clone()) for n, t in old if n in names)

        load([policy, (drafter, taken(), config)])

    monkeypatch.setattr(worker, "load_again", stale)
    sync(rollout, Source(tensors(2)))
    named = differing(rollout, tensors(2))
    assert named
    assert all(".mtp_layers." in name for name in named)
    monkeypatch.undo()
    sync(rollout, Source(tensors()))
    assert differing(rollout, tensors()) == []


def own_table(worker: Any) -> None:
    """Give the drafter a rotary table of its own, as models have whose drafters turn other dims."""
    for module in worker.model_runner.drafter.model.modules():
        if hasattr(module, "rotary_emb"):
            module.rotary_emb = copy.deepcopy(module.rotary_emb)


def lose_buffers(worker: Any) -> None:
    """What level-2 sleep does to them on a GPU."""
    for buffer in worker._models().drafter_buffers().values():
        buffer.zero_()


@pytest.mark.skipif(DEVICE != "cpu", reason="captured graphs know the first table")
def test_sleep_that_loses_buffers_costs_no_acceptance(start: Any, path: Any) -> None:
    rollout = start("mimo", path, draft_tokens=1)
    call = rollout._engine._engine.collective_rpc
    before = accepted(rollout)
    call(own_table)
    assert accepted(rollout) == before
    rollout.sleep(2)
    call(lose_buffers)
    rollout.wake("weights")
    sync(rollout, Source(tensors()))
    assert accepted(rollout) == before
    call(lose_buffers)
    assert responses(rollout) == greedy_by_transformers(25)  # what comes out does not show it
    assert accepted(rollout) < before


def test_without_a_drafter_its_weights_are_proved_to_have_come(start: Any, path: Any) -> None:
    rollout = start("mimo", path, mode="offline" if DEVICE == "cpu" else "server")
    sync(rollout, Source(tensors(1)))
    assert differing(rollout, tensors(1)) == []


def test_a_server_drafts_alike(start: Any, path: Any, rollout: Any) -> None:
    """In a process of its own, whose counters are vLLM's."""
    server = start("mimo", path, draft_tokens=1, mode="server")
    assert responses(server) == greedy_by_transformers(25)
    assert accepted(server) == pytest.approx(accepted(rollout), abs=0.02)
    assert min(p_values(server, 1000)) > SURE
    assert min(p_values(server, 1000, **CUTS[-1])) > SURE


@pytest.mark.skipif(DEVICE == "cpu", reason="vLLM for CPU has no second runner")
def test_drafts_change_no_token_of_a_sample(start: Any, path: Any, rollout: Any) -> None:
    """vLLM's second runner draws the policy's tokens with the same noise, drafted or not; those of other shapes of a batch may differ by a tie."""
    plain = start("mimo", path, mode="server")
    requests = [Request(p, samples=32, seed=n) for n, p in enumerate(PROMPTS)]
    asked = Sampling(max_response_tokens=12)
    rows = (
        [s.response_ids for row in one.generate(requests, asked) for s in row] for one in (plain, rollout)
    )
    same = [a == b for a, b in zip(*rows, strict=True)]
    assert sum(same) > 0.9 * len(same)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, one vLLM a process can sleep")
def test_speculation_that_vllm_leaves_out_is_found(
    start: Any, path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = compat.make_offline

    def without(arguments: Any, *, processes: bool) -> Any:
        return make({k: v for k, v in arguments.items() if k != "speculative_config"}, processes=processes)

    monkeypatch.setattr(compat, "make_offline", without)
    with pytest.raises(UserError, match="has left that out of its settings"):
        start("mimo", path, draft_tokens=1)
