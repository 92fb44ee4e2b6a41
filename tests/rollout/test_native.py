"""Native generation says what the models say: transformers' greedy tokens, the engine's own log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.packing.plan import RankCell
from quintet.rollout.base import Request, Sampling
from tests.oracle.reference import VOCAB, model, save
from tests.rollout.prompts import PROMPTS, text

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "uneven-pp2": (2, {"pp": 2, "stage_layers": [0, 4]}),
}


def generate(
    path: Path,
    layout: dict[str, Any],
    runs: list[tuple[list[Request], Sampling, int]],
    recheck: bool = False,
    dtype: str = "fp32",
) -> Any:
    """On one rank: each run's samples, and with `recheck` the engine's log-probs of the first run's."""
    from quintet.data.batch import make_batch
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema
    from quintet.rollout.native.rollout import NativeRollout

    engine = Engine(
        read_shape(path),
        schema.Layout(**layout),
        engine=schema.Engine(tokens_per_microbatch_per_rank=4096),
        optimizer=None,
        dtype=dtype,
    )
    engine.load_hf(path)
    out = []
    for requests, sampling, slots in runs:
        rollout = NativeRollout(engine.model, engine.mesh, slots=slots, decode=text, update=lambda: 0)
        out.append(rollout.generate(requests, sampling))
    if not recheck:
        return out
    samples = [(r.prompt_ids, s) for r, row in zip(runs[0][0], out[0], strict=True) for s in row]
    batch = make_batch([p + s.response_ids for p, s in samples], [len(p) for p, _ in samples])
    again = engine.forward(
        batch, [RankCell(list(range(len(samples))))], temperature=runs[0][1].temperature or 1.0
    )
    return out, (again.logprobs if again is not None else None)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save("qwen3", tmp_path_factory.mktemp("native"))


def greedy_by_transformers(prompt: list[int], tokens: int, name: str = "qwen3") -> list[int]:
    made, ids = model(name), list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(made(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_equals_transformers(pool, path, layout):
    world, sizes = LAYOUTS[layout]
    requests = [Request(p) for p in PROMPTS]
    runs = [(requests, Sampling(temperature=0, max_response_tokens=10), slots) for slots in (8, 2)]
    for result in pool.run(generate, world, path, sizes, runs):
        for run in result:
            for prompt, row in zip(PROMPTS, run, strict=True):
                assert row[0].response_ids == greedy_by_transformers(prompt, 10)
                assert row[0].finish == "length"


OTHERS = [
    ("qwen2", "tp2-sp"),
    ("llama", "pp2"),
    ("mimo", "one"),
    ("qwen3_moe", "tp2-sp"),
    ("deepseek_v3", "pp2"),
    ("glm4_moe", "one"),
    ("mixtral", "one"),
    ("gpt_oss", "tp2-sp"),
    *(
        pytest.param(name, layout, marks=pytest.mark.slow)
        for name, layouts in {
            "qwen3_moe": ("one", "tp2", "pp2"),
            "deepseek_v3": ("one", "tp2", "tp2-sp"),
            "glm4_moe": ("tp2-sp", "pp2"),
            "mixtral": ("tp2-sp",),
            "gpt_oss": ("pp2",),
        }.items()
        for layout in layouts
    ),
]


@pytest.mark.parametrize(("name", "layout"), OTHERS)
def test_every_family_generates(pool, tmp_path, name, layout):
    world, sizes = LAYOUTS[layout]
    runs = [([Request(p) for p in PROMPTS], Sampling(temperature=0, max_response_tokens=8), 3)]
    for (run,) in pool.run(generate, world, save(name, tmp_path), sizes, runs):
        for prompt, row in zip(PROMPTS, run, strict=True):
            assert row[0].response_ids == greedy_by_transformers(prompt, 8, name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_engines(pool, path, layout, temperature):
    world, sizes = LAYOUTS[layout]
    requests = [Request(p, samples=3, seed=i) for i, p in enumerate(PROMPTS)]
    cuts = {"top_p": 0.9, "min_p": 0.01} if temperature != 1 else {}
    sampling = Sampling(temperature=temperature, max_response_tokens=20, stop_token_ids=(3, 4, 5), **cuts)
    results = pool.run(generate, world, path, sizes, [(requests, sampling, 7)], recheck=True)
    checked = 0
    for (run,), again in results:
        said = [
            x
            for row, p in zip(run, PROMPTS, strict=True)
            for s in row
            for x in [0.0] * len(p) + s.policy_logprobs
        ]
        if again is not None:
            torch.testing.assert_close(torch.tensor(said), again, rtol=1e-5, atol=2e-5)
            checked += 1
    assert checked >= 1


@pytest.mark.parametrize(
    ("layout", "tokens"), [("one", 40), pytest.param("tp2-sp", 12, marks=pytest.mark.slow)]
)
def test_bf16_rollout_and_trainer_part_by_rounding_only(pool, path, layout, tokens):
    world, sizes = LAYOUTS[layout]
    requests = [Request(p, samples=8, seed=i) for i, p in enumerate(PROMPTS)]
    sampling = Sampling(max_response_tokens=tokens)
    results = pool.run(generate, world, path, sizes, [(requests, sampling, 7)], recheck=True, dtype="bf16")
    for (run,), again in results:
        if again is None:
            continue
        said = [
            x
            for row, p in zip(run, PROMPTS, strict=True)
            for s in row
            for x in [0.0] * len(p) + s.policy_logprobs
        ]
        gap = (torch.tensor(said) - again).abs()
        assert gap.mean() < 0.02
        assert gap.max() < 0.5


def test_noise_does_not_depend_on_company(pool, path):
    requests = [Request(p, samples=4, seed=100 + i) for i, p in enumerate(PROMPTS)]
    sampling = Sampling(max_response_tokens=12, stop_token_ids=(3, 4, 5, 6, 7, 8))
    runs = [(requests, sampling, slots) for slots in (64, 5, 1)]
    runs += [([request], sampling, 4) for request in requests]
    together, few, single, *alone = pool.run(generate, 1, path, {}, runs)[0]
    ids = [[s.response_ids for s in row] for row in together]
    assert [[s.response_ids for s in row] for row in few] == ids
    assert [[s.response_ids for s in row] for row in single] == ids
    assert [[s.response_ids for s in run[0]] for run in alone] == ids
    assert len({tuple(x) for row in ids for x in row}) > 15  # samples of one prompt differ
    assert {s.finish for row in together for s in row} == {"stop", "length"}


def test_stop_strings_and_limits(pool, path):
    wanted = text(greedy_by_transformers(PROMPTS[0], 10))
    stop = wanted[4:6]
    sampling = Sampling(temperature=0, max_response_tokens=10, stop=(stop,))
    requests = [Request(PROMPTS[0]), Request(PROMPTS[0], samples=2, max_response_tokens=(1, 3))]
    first, limited = pool.run(generate, 1, path, {}, [(requests, sampling, 8)])[0][0]
    assert first[0].finish == "stop"
    assert first[0].text == wanted[: wanted.index(stop)]
    assert [len(s.response_ids) for s in limited] == [1, 3]


def test_vocabulary_padding_is_never_drawn(pool, path):
    requests = [Request([1], samples=64, seed=3)]
    sampling = Sampling(temperature=5.0, max_response_tokens=8)
    for (run,) in pool.run(generate, 2, path, {"tp": 2}, [(requests, sampling, 64)]):
        assert max(t for s in run[0] for t in s.response_ids) < VOCAB
