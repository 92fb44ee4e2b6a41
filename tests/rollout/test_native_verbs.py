"""The native back end's other verbs: scoring, routes, and what another thread may ask while it generates."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quintet.errors import UserError
from quintet.rollout.base import Request, Sampling
from tests.oracle.models import model, save
from tests.rollout.native_ranks import LAYOUTS, FileSource, own_rollout, tensors
from tests.rollout.prompts import PROMPTS, text

SEQUENCES = [[5, 9, 2, 44, 17], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [60, 0]]


def loaded(path: Path, layout: dict[str, Any], **how: Any) -> Any:
    rollout = own_rollout(path, layout, **how)
    rollout.update_weights(FileSource(tensors(path), rollout.receivers()[0]))
    return rollout


def scored(path: Path, layout: dict[str, Any], tokens_per_row: int) -> Any:
    """On one rank."""
    from quintet.rollout.native import rollout as room

    room.PREFILL_TOKENS = tokens_per_row
    try:
        return loaded(path, layout).score(SEQUENCES)
    finally:
        room.PREFILL_TOKENS = 16384


@pytest.mark.parametrize(
    ("layout", "tokens_per_row"),
    [
        ("one", 5),
        ("tp2-sp", 6),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("one", 16384), ("tp2", 16384), ("pp2", 12))
        ),
    ],
)
def test_scores_are_transformers_log_probs(pool, tmp_path, layout, tokens_per_row):
    path = save("qwen3", tmp_path)
    world, sizes = LAYOUTS[layout]
    made = model("qwen3")
    for ranks in pool.run(scored, world, path, sizes, tokens_per_row):
        for ids, found in zip(SEQUENCES, ranks, strict=True):
            with torch.no_grad():
                logprobs = made(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            want = logprobs[:-1].gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(found), want, rtol=1e-5, atol=2e-5)


def routed(path: Path, layout: dict[str, Any], slots: int) -> Any:
    """On one rank: samples with their routes; and how many modules are heard afterwards, or routers answered."""
    rollout = loaded(path, layout, return_routes=True)
    rollout.slots = slots
    requests = [Request(p, samples=2, seed=i) for i, p in enumerate(PROMPTS)]
    answered = rollout.generate(requests, Sampling(max_response_tokens=9, stop_token_ids=tuple(range(8))))
    modules = list(rollout.model.modules())
    hooked = sum(len(m._forward_hooks) + (getattr(m, "router_replay", None) is not None) for m in modules)
    return answered, hooked


def chosen_by_transformers(name: str, ids: list[int]) -> np.ndarray:
    """[tokens, layers with experts, top-k], sorted."""
    made, heard = model(name), {}
    for number, layer in enumerate(made.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(
                lambda module, given, number=number: heard.__setitem__(number, given[1])
            )
    with torch.no_grad():
        made(input_ids=torch.tensor([ids]))
    return torch.stack([heard[n] for n in sorted(heard)], dim=1).sort(-1).values.numpy()


@pytest.mark.parametrize(
    ("name", "layout", "slots"),
    [
        ("qwen3_moe", "one", 8),
        ("qwen3_moe", "tp2-sp", 3),
        ("qwen3_moe", "tp2", 8),
        ("deepseek_v3", "pp2", 8),
        pytest.param("qwen3_moe", "pp2", 3, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "tp2-pp2", 8, marks=pytest.mark.slow),
    ],
)
def test_routes_are_transformers_choices(pool, tmp_path, name, layout, slots):
    path = save(name, tmp_path)
    world, sizes = LAYOUTS[layout]
    if layout == "tp2-pp2":
        sizes = {**sizes, "sp": True}
    for answered, hooked in pool.run(routed, world, path, sizes, slots):
        assert hooked == 0
        for prompt, row in zip(PROMPTS, answered, strict=True):
            for sample in row:
                want = chosen_by_transformers(name, prompt + sample.response_ids)[:-1]
                assert sample.routes.dtype == np.int16
                assert np.array_equal(np.sort(sample.routes, -1), want)


def no_experts(path: Path) -> None:
    with pytest.raises(UserError, match="return_routes"):
        own_rollout(path, {}, return_routes=True)
    rollout = loaded(path, {})
    with pytest.raises(UserError, match="no tokens"):
        rollout.score([[1], []])
    assert rollout.score([]) == []
    (row,) = rollout.generate([Request([1])], Sampling(max_response_tokens=1))
    assert row[0].routes is None


def test_what_cannot_be_told_is_refused(pool, tmp_path):
    pool.run(no_experts, 1, save("qwen3", tmp_path))


LONG = Sampling(max_response_tokens=200, ignore_end=True, stop=("~",))
"""Its stop string never comes, but is looked for at every token: so `decode` is called."""


class Interrupted:
    """A tokenizer's decode that calls something at the n-th token."""

    def __init__(self, at: int, call: Any) -> None:
        self.left, self.call = at, call

    def __call__(self, ids: list[int]) -> str:
        self.left -= 1
        if self.left == 0:
            self.call()
        return text(ids)


def aborted(path: Path, layout: dict[str, Any]) -> Any:
    """On one rank: the rank that owns the output gives the requests up at its 50th token; then all start anew."""
    rollout = loaded(path, layout)
    if rollout.mesh.owns_output:
        rollout._decode = Interrupted(50, lambda: rollout.abort())
    requests = [Request(p, samples=4, seed=i) for i, p in enumerate(PROMPTS)]
    given_up = rollout.generate(requests, LONG)
    rollout._decode = text
    rollout.abort()  # nothing is under way: nothing happens
    rollout.sleep(2)  # and nothing holds the memory
    rollout.wake("weights")
    rollout.update_weights(FileSource(tensors(path), rollout.receivers()[0]))
    rollout.wake("kv_cache")
    return given_up, rollout.generate(requests, Sampling(max_response_tokens=12))


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_abort_ends_all_ranks_at_the_same_token(pool, tmp_path, layout):
    world, sizes = LAYOUTS[layout]
    ranks = pool.run(aborted, world, save("qwen3", tmp_path), sizes)
    for given_up, after in ranks:
        assert (given_up, after) == ranks[0]
        assert {s.finish for row in given_up for s in row} == {"abort"}
        counts = {len(s.response_ids) for row in given_up for s in row}
        assert 0 in counts  # 20 samples, 8 slots: some had not started
        assert max(counts) < 20
        assert all(len(s.logprobs) == len(s.response_ids) for row in given_up for s in row)
        assert {len(s.response_ids) for row in after for s in row} == {12}


def held_together(path: Path, layout: dict[str, Any]) -> Any:
    """On one rank: what the requests come to; and again, held and let go by a thread of the rank that owns the output, and how often
    it was asked meanwhile."""
    rollout = loaded(path, layout)
    requests = [Request(p, samples=4, seed=i) for i, p in enumerate(PROMPTS)]
    want = rollout.generate(requests, LONG)
    asked: list[float] = []
    agreed = rollout._stage.agreed
    rollout._stage.agreed = lambda state: (asked.append(time.monotonic()), agreed(state))[1]
    if rollout.mesh.owns_output:

        def hold() -> None:
            rollout.pause()
            threading.Timer(1.0, rollout.resume).start()

        rollout._decode = Interrupted(50, hold)
    found = rollout.generate(requests, LONG)
    return want, found, asked[-1] - asked[1]


@pytest.mark.parametrize(
    "layout", [pytest.param("tp2", marks=pytest.mark.nightly), pytest.param("pp2", marks=pytest.mark.slow)]
)
def test_pause_holds_all_ranks_at_the_same_token(pool, tmp_path, layout):
    world, sizes = LAYOUTS[layout]
    for want, found, held_s in pool.run(held_together, world, save("qwen3", tmp_path), sizes):
        assert found == want
        assert held_s > 0.5  # no rank sat in one collective all the while


def streamed(path: Path, layout: dict[str, Any], return_routes: bool) -> Any:
    """On one rank: groups in the order in which they finished, with the longest response that was under way then; all in order."""
    rollout = loaded(path, layout, return_routes=return_routes)
    limits = [(9, 9), (3, 20), (2, 4), (1, 1)]
    requests = [
        Request(PROMPTS[i], samples=2, seed=i, max_response_tokens=most) for i, most in enumerate(limits)
    ]
    sampling = Sampling(ignore_end=True)
    came = list(rollout.stream(requests, sampling))
    return came, rollout.generate(requests, sampling)


@pytest.mark.parametrize(
    ("name", "layout", "routes"),
    [("qwen3", "one", False), ("qwen3", "pp2", False), ("qwen3_moe", "tp2-sp", True)],
)
def test_a_group_is_told_when_its_last_sample_is_done(pool, tmp_path, name, layout, routes):
    world, sizes = LAYOUTS[layout]
    for came, in_order in pool.run(streamed, world, save(name, tmp_path), sizes, routes):
        assert [number for number, _ in came] == [3, 2, 0, 1]
        for number, samples in came:
            for one, other in zip(samples, in_order[number], strict=True):
                assert (one.response_ids, one.text) == (other.response_ids, other.text)
                assert np.array_equal(one.routes, other.routes) if routes else one.routes is None


def held(path: Path) -> None:
    """Another thread generates; this one holds it."""
    rollout = loaded(path, {})
    requests = [Request(p, seed=i) for i, p in enumerate(PROMPTS)]
    want = rollout.generate(requests, LONG)
    reached = threading.Event()
    rollout._decode = Interrupted(30, lambda: (rollout.pause(), reached.set()))
    answered: list[Any] = []
    thread = threading.Thread(target=lambda: answered.append(rollout.generate(requests, LONG)))
    thread.start()
    assert reached.wait(60)
    for call in (
        lambda: rollout.generate(requests, LONG),
        lambda: rollout.score([[1, 2]]),
        lambda: rollout.sleep(2),
        lambda: rollout.update_weights(FileSource({}, [])),
    ):
        with pytest.raises(RuntimeError, match="under way"):
            call()
    time.sleep(0.2)
    assert thread.is_alive()
    assert not answered
    rollout.resume()
    thread.join(60)
    assert answered == [want]

    rollout.pause()
    with pytest.raises(RuntimeError, match="paused"):
        rollout.generate(requests, LONG)
    rollout.resume()
    assert rollout.generate(requests, LONG) == want

    reached.clear()
    rollout._decode = Interrupted(30, lambda: (rollout.pause(), reached.set()))
    answered.clear()
    thread = threading.Thread(target=lambda: answered.append(rollout.generate(requests, LONG)))
    thread.start()
    assert reached.wait(60)
    rollout.abort()  # also what is held
    thread.join(60)
    assert {s.finish for row in answered[0] for s in row} == {"abort"}
    rollout.resume()


def test_pause_holds_another_thread_and_abort_ends_it(pool, tmp_path):
    pool.run(held, 1, save("qwen3", tmp_path))
