"""Every place where rollout and trainer can part is planted in recorded numbers, and found by what a real model computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintet.cluster.worker import Place
from quintet.controller.messages import ReplayTokens, TrainedTokens
from quintet.controller.replay import Replay, ReplaySample
from quintet.diagnose.diagnosis import Diagnosis, Evidence, judge
from quintet.diagnose.find_weights import Weights
from quintet.diagnose.mismatch import OwnLayout, gather
from quintet.diagnose.oracle_model import PlainWorker
from quintet.recipe.schema import Data, Model, Recipe
from quintet.rollout.base import Sampling
from tests.oracle.models import save

PROMPT, RESPONSE = 4, 24
POLICY = Sampling(temperature=0.7)
SAMPLING = replace(POLICY, top_p=0.8)


def copy_changed(path: Path, target: Path, change: Any) -> Path:
    """A model's directory once more, with its tensors changed."""
    target.mkdir()
    (target / "config.json").write_text((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def swap_experts(tensors: dict[str, Tensor]) -> None:
    """Two experts of the first layer change places."""
    for name in [n for n in tensors if "layers.0." in n and ".experts.0." in n]:
        other = name.replace(".experts.0.", ".experts.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def drift(tensors: dict[str, Tensor]) -> None:
    """As far as an update may carry the weights."""
    generator = torch.Generator().manual_seed(3)
    for name, value in tensors.items():
        tensors[name] = value + 0.02 * value.abs().mean() * torch.randn(value.shape, generator=generator)


class Bench:
    """A model in this process, samples drawn from it, and diagnoses of numbers that are said to be of them."""

    def __init__(self, path: Path) -> None:
        recipe = Recipe(model=Model(path=path), data=Data(task="addition"))
        self.worker = PlainWorker(Place(0, 1, 0, 1, "cpu", "", 0, 60.0), recipe, path)
        self.worker.model = self.worker._make("fp32")
        self.weights = Weights(1, path, path)
        self.worker.load(self.weights)
        self.ids = [self._draw(seed) for seed in range(3)]
        self.prompts = [PROMPT] * len(self.ids)
        self.right = self.of(POLICY)
        bf16 = self.worker.in_bf16(self.weights, self.ids, self.prompts, POLICY)
        self.worker.in_bf16 = lambda *args: bf16  # once is enough

    def _draw(self, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, 50, (PROMPT,), generator=generator).tolist()
        for _ in range(RESPONSE):
            logits = self.worker.model.logits([*ids, 0], len(ids))[0]
            p, order = (logits / POLICY.temperature).softmax(-1).sort(descending=True)
            p[p.cumsum(0) - p >= SAMPLING.top_p] = 0
            ids.append(int(order[torch.multinomial(p, 1, generator=generator)]))
        return ids

    def of(self, sampling: Sampling, weights: Path | None = None, routes: Any = None) -> Tensor:
        if weights is not None:
            self.worker.load(Weights(0, weights, weights))
        (found,) = self.worker.logprobs(self.ids, self.prompts, [sampling], routes)
        if weights is not None:
            self.worker.load(self.weights)
        return found

    def diagnose(
        self,
        rollout: Tensor,
        trainer: Tensor,
        before: Path | None = None,
        routes: Any = None,
        replayed: bool = False,
    ) -> tuple[Diagnosis, Evidence]:
        cut = zip(self.ids, rollout.split(RESPONSE), trainer.split(RESPONSE), strict=True)
        samples = [
            ReplaySample(
                "", "", "stop",
                ReplayTokens(ids, PROMPT, r.tolist(), None if routes is None else routes[at]),
                TrainedTokens(ids, PROMPT, r.tolist(), t.tolist()),
            )
            for at, (ids, r, t) in enumerate(cut)
        ]  # fmt: skip
        earlier = None if before is None else Weights(0, before, before)
        evidence = gather(
            lambda verb, *args: getattr(self.worker, verb.__name__)(*args),
            Replay(2, 1, SAMPLING, samples),
            self.weights,
            earlier,
            OwnLayout("fp32", None, None, None),
            temperature=POLICY.temperature,
            replayed=routes if replayed else None,
        )
        return judge(evidence), evidence


def told(diagnosis: Diagnosis) -> tuple[str | None, str]:
    return diagnosis.place, diagnosis.sentence


def dense(path: Path, stale: Path) -> dict[str, tuple[str | None, str]]:
    bench = Bench(path)
    right = bench.right
    generator = torch.Generator().manual_seed(1)
    rounded = right + 1e-6 * torch.randn(right.shape, generator=generator)
    bf16 = bench.worker.in_bf16(bench.weights, bench.ids, bench.prompts, POLICY)
    late = torch.cat([torch.cat((row[:1], row[:-1])) for row in right.split(RESPONSE)])
    noise = right - torch.rand(right.shape, generator=generator)
    cases = {
        "agree": (rounded, right),
        "not tempered": (bench.of(Sampling()), right),
        "another temperature": (bench.of(Sampling(temperature=0.55)), right),
        "trainer not tempered": (right, bench.of(Sampling())),
        "top-p": (bench.of(SAMPLING), right),
        "late": (late, right),
        "stale": (bench.of(POLICY, stale), right),
        "trainer stale": (right, bench.of(POLICY, stale)),
        "bf16": (bf16, right),
        "unexplained": (noise, right),
        "no number": (torch.where(torch.arange(len(right)) == 3, torch.nan, right), right),
    }
    return {name: told(bench.diagnose(*numbers, before=stale)[0]) for name, numbers in cases.items()}


def test_places_of_a_dense_model(pool, tmp_path):
    path = save("qwen3", tmp_path / "model")
    stale = copy_changed(path, tmp_path / "stale", drift)
    (found,) = pool.run(dense, 1, path, stale)
    places = {name: place for name, (place, _) in found.items()}
    assert places == {
        "agree": None,
        "not tempered": "temperature and filters",
        "another temperature": "temperature and filters",
        "trainer not tempered": "temperature and filters",
        "top-p": "temperature and filters",
        "late": "tokens",
        "stale": "weights",
        "trainer stale": "weights",
        "bf16": "kernels and precision",
        "unexplained": "weights",
        "no number": "kernels and precision",
    }
    says = {
        "not tempered": "rollout's log-probs are those of temperature 1: rollout.temperature is not applied",
        "another temperature": "rollout's log-probs are those of temperature 0.55",
        "trainer not tempered": "trainer's log-probs are those of temperature 1",
        "top-p": "rollout's log-probs are those of the distribution after top-p",
        "late": "those of the token one position before",
        "stale": "rollout's log-probs are those of the weights after step 0",
        "trainer stale": "trainer's log-probs are those of the weights after step 0",
        "bf16": "no more than computing in bf16 comes to",
        "unexplained": "no temperature, filter, route or position explains",
        "no number": "1 of the rollout's log-probs are no finite numbers",
    }
    for name, text in says.items():
        assert text in found[name][1], found[name]


def mixture(
    path: Path, swapped: Path
) -> tuple[dict[str, tuple[str | None, str]], list[float | None], dict[str, tuple[str | None, str]], float]:
    bench = Bench(path)
    own = []
    for ids in bench.ids:
        bench.worker.model.logits(ids, PROMPT)
        own.append(bench.worker.model.routes(len(ids) - 1))
    experts = int(max(one.max() for one in own)) + 1
    generator = torch.Generator().manual_seed(1)
    other = []
    for one in own:  # every tenth token goes one expert further, in all layers
        moved = torch.rand(len(one), generator=generator) < 0.1
        other.append(torch.where(moved[:, None, None], (one + 1) % experts, one))
    sent, _ = bench.worker.routed(bench.ids, bench.prompts, other, POLICY)
    cases = {
        "agree": (bench.right, own),
        "other routes": (sent, other),
        "swapped experts": (bench.of(POLICY, swapped), own),
    }
    found = {
        name: bench.diagnose(numbers, bench.right, routes=routes) for name, (numbers, routes) in cases.items()
    }
    shares = [e.routes for _, e in found.values()]
    # Of a run that replays: the trainer was told these routes too.
    replaying = {
        "agree": (sent, sent),
        "not replayed": (sent, bench.right),
        "not tempered": (bench.of(Sampling(), routes=other), sent),
        "stale": (bench.of(POLICY, swapped, other), sent),
    }
    of_replay = {
        name: bench.diagnose(*numbers, before=swapped, routes=other, replayed=True)
        for name, numbers in replaying.items()
    }
    off = (of_replay["agree"][1].plain - sent).abs().max().item()
    return (
        {name: told(one) for name, (one, _) in found.items()},
        shares,
        {name: told(one) for name, (one, _) in of_replay.items()},
        off,
    )


def test_places_of_a_mixture_of_experts(pool, tmp_path):
    path = save("qwen3_moe", tmp_path / "model")
    swapped = copy_changed(path, tmp_path / "swapped", swap_experts)
    ((found, routes, replaying, off),) = pool.run(mixture, 1, path, swapped)
    assert found["agree"][0] is None
    assert found["other routes"][0] == "routes", found
    assert "those of the routes that the rollout told" in found["other routes"][1]
    assert found["swapped experts"][0] == "weights", found
    assert routes[0] == 0
    assert 0.02 < routes[1] < 0.3
    assert off == 0
    assert {name: place for name, (place, _) in replaying.items()} == {
        "agree": None,
        "not replayed": "routes",
        "not tempered": "temperature and filters",
        "stale": "weights",
    }
    assert "Both" not in replaying["agree"][1]
    assert (
        "trainer's log-probs are those of other routes, which the model chose by itself"
        in (replaying["not replayed"][1])
    )


NUMBERS = torch.linspace(-3, -0.1, 50)


@pytest.mark.parametrize(
    ("found", "place", "says"),
    [
        ({"tokens": ["Sample 0: token 7."], "sync": "no"}, "tokens", "token 7"),
        ({"sync": "tensor x differs"}, "weights", "do not arrive at the rollout: tensor x differs"),
        ({"engine": NUMBERS - 0.2}, "kernels and precision", "engine in its own layout"),
        ({"now": (NUMBERS + 0.01, NUMBERS)}, "kernels and precision", "as much as bf16 comes to"),
        ({"now": (NUMBERS + 0.5, NUMBERS)}, "kernels and precision", "more than bf16 comes to"),
        ({"now": (NUMBERS, NUMBERS), "engine": NUMBERS + 1e-6}, None, "agree"),
    ],
)
def test_what_is_found_now(found, place, says):
    evidence = Evidence("fp32", NUMBERS, NUMBERS, NUMBERS, NUMBERS + 0.01, **found)
    diagnosis = judge(evidence)
    assert diagnosis.place == place
    assert says in diagnosis.sentence
    assert bool(diagnosis.advice) == (place is not None)


def test_in_bf16_rounding_is_agreement():
    generator = torch.Generator().manual_seed(0)
    noise = [0.01 * torch.randn(50, generator=generator) for _ in range(3)]
    evidence = Evidence("bf16", NUMBERS + noise[0], NUMBERS + noise[1], NUMBERS, NUMBERS + noise[2])
    assert judge(evidence).place is None
    assert judge(replace(evidence, dtype="fp32")).place == "kernels and precision"


def test_agreement_on_numbers_of_other_weights_is_told():
    """As where the model on the disk is another by now."""
    off = NUMBERS - 0.4
    diagnosis = judge(Evidence("fp32", off, off + 1e-6, NUMBERS, NUMBERS + 0.01, engine=NUMBERS))
    assert diagnosis.place is None
    assert "Both are 0.4 nats from what these weights come to" in diagnosis.sentence
    assert "Both" not in judge(Evidence("fp32", NUMBERS, NUMBERS, NUMBERS, NUMBERS + 0.01)).sentence
