"""Whole GRPO steps of the benchmark of dynamic context parallelism: generate, old log-probs, update, with the verbs of a run's own loop.

One run takes all steps, planned by each side in turns. Every step generates anew, responses of the lengths that a mix has; the samples of the
first are what all train on, and weights stay what they are, so that what steps tell can be compared.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.dynamic_cp_work import Side, Work
from benchmarks.records import ROOT, record
from quintet.packing.time_model import CellCosts

if TYPE_CHECKING:  # it brings Ray
    from quintet.controller.samples import Samples

SAMPLES_PER_PROMPT = 8
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-5}
"""Of gradient norms and means over tokens. Losses may be 1e-5 apart in either type: old log-probs are of the same weights."""


class Whole(NamedTuple):
    """What a step came to. told: loss, gradient norm, and the means over trained tokens."""

    generate_s: float
    train_s: float
    told: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.generate_s + self.train_s


def prompt_tokens(work: Work) -> int:
    """Return the tokens of every prompt: half of the shortest sample that any mix may have."""
    return min(law.shortest for law, _ in work.mixes.values()) // 2


def recipe_of(work: Work, model: Path, mix: str, budget: int, memory_fraction: float) -> Any:
    """Return the recipe of a run that trains on samples of a mix. budget: the larger of the sides'."""
    from quintet.recipe import schema

    law, samples = work.mixes[mix]
    rollout = {"backend": "vllm", "memory_fraction": memory_fraction} if torch.cuda.is_available() else {}
    return schema.Recipe.model_validate(
        {
            "cluster": {"ranks": work.gpus, "device": "cuda" if torch.cuda.is_available() else "cpu"},
            "model": {"path": str(model), "dtype": work.dtype},
            "layout": work.layout,
            "data": {"chat": False, "max_prompt_tokens": prompt_tokens(work)},
            "engine": {"tokens_per_microbatch_per_rank": budget, "recompute": work.recompute, **work.engine},
            "rollout": {
                "max_response_tokens": law.longest - prompt_tokens(work),
                "sequences_per_rank": -(-samples // work.gpus),
                "layout": {"tp": 1},
                **rollout,
            },
            "optimizer": {"lr": 1e-12, "weight_decay": 0.0},
        }
    )


class Steps:
    """A run whose steps can be planned by any side."""

    def __init__(self, controller: Any, recipe: Any, work: Work, mix: str, costs: CellCosts) -> None:
        from benchmarks.step import LETTERS
        from quintet.data.prompts import make_prompts
        from quintet.data.tokenizer import load_tokenizer
        from quintet.rollout.base import Sampling
        from quintet.train.algorithms import Score, algorithm_of

        self._controller, self._work, self._costs = controller, work, costs
        made = algorithm_of(recipe, controller.roles)
        self._algorithm = replace(made, scores=(Score("old_logprobs", controller.policy),))
        self._sampling = Sampling(max_response_tokens=recipe.rollout.max_response_tokens, ignore_end=True)
        given = prompt_tokens(work)
        wanted = [length - given for length in work.lengths(mix)]
        self._lengths = [
            wanted[at : at + SAMPLES_PER_PROMPT] for at in range(0, len(wanted), SAMPLES_PER_PROMPT)
        ]
        draw = random.Random(mix)
        texts = ["".join(draw.choices(LETTERS, k=given)) for _ in self._lengths]
        self._prompts = make_prompts(texts, recipe.data, load_tokenizer(recipe.model.path))
        self._samples: Samples | None = None

    def take(self, side: Side) -> Whole:
        """Take a step that a side plans."""
        from quintet.train.ppo import learn
        from quintet.train.steps import Step

        controller, step = self._controller, Step(1)
        # Static cells too are cells of the one block that all ranks are.
        controller._scatterer.plan = lambda lengths, *_: replace(
            side.plan(self._work, lengths, self._costs), block=self._work.gpus
        )
        began = time.perf_counter()
        with controller.generating():
            samples = controller.generate(
                self._prompts, self._sampling, SAMPLES_PER_PROMPT, "step", self._lengths
            )
        generated = time.perf_counter()
        controller.reward(samples)
        self._samples = self._samples or samples
        learn(self._algorithm, controller.scatter(self._samples), step)
        controller.policy.publish()
        ended = time.perf_counter()
        if [one.response_tokens for one in samples.generated] != [n for some in self._lengths for n in some]:
            raise AssertionError("the responses do not have the lengths of the work")
        update = step.updates["policy"]
        told = {"loss": update.loss, "grad_norm": update.grad_norm, **update.tally.means()}
        return Whole(generated - began, ended - generated, told)


@contextmanager
def started(work: Work, mix: str, budget: int, memory_fraction: float, costs: CellCosts) -> Iterator[Steps]:
    """Start the run on random weights, and end it."""
    from benchmarks.step import write_inputs
    from quintet.cluster.cluster import Cluster
    from quintet.controller.controller import Controller
    from quintet.rewards.load import load_reward
    from quintet.rewards.pool import RewardPool

    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="quintet-dynamic-cp-"))
        model = write_inputs(Path(directory), work.config)
        recipe = recipe_of(work, model, mix, budget, memory_fraction)
        cluster = stack.enter_context(Cluster(recipe.cluster))
        reward = load_reward(f"{ROOT / 'benchmarks' / 'laptop_cases.py'}:reward")
        pool = stack.enter_context(RewardPool(reward, recipe.reward, cluster.log_dir))
        controller = Controller(cluster, recipe, model, work.model, rewards=pool)
        print(f"{mix}, whole steps, generated by {recipe.rollout.backend}", flush=True)
        yield Steps(controller, recipe, work, mix, costs)


def measure_steps(
    work: Work,
    mix: str,
    sides: tuple[Side, Side],
    costs: CellCosts,
    turns: int,
    memory_fraction: float,
) -> list[dict[str, Any]]:
    """Let a dynamic and a static side take whole steps in turns, after one each that is not counted; the records. SystemExit where
    steps tell different things."""
    ran: dict[Side, list[Whole]] = {side: [] for side in sides}
    budget = max(side.budget for side in sides)
    with started(work, mix, budget, memory_fraction, costs) as steps:
        for _ in range(1 + turns):
            for side, of_side in ran.items():
                of_side.append(steps.take(side))
    told = same([one.told for of_side in ran.values() for one in of_side], TOLERANCE[work.dtype])
    print(f"  the steps of both sides agree: {told}", flush=True)
    for side, of_side in ran.items():
        spent = ", ".join(f"{one.generate_s:.2f} + {one.train_s:.2f}" for one in of_side[1:])
        print(f"  {side.name}: {spent} s", flush=True)

    def median(name: str) -> tuple[float, float]:
        ours, theirs = (statistics.median(getattr(one, name) for one in ran[side][1:]) for side in sides)
        return ours, theirs

    tokens = sum(work.lengths(mix))
    ours, theirs = (tokens / seconds for seconds in median("seconds"))
    values = {"tokens_per_s": ("tokens/s", ours, theirs)}
    values |= {name: ("s", *median(name)) for name in ("generate_s", "train_s")}
    case = f"{work.title}/{work.gpus}ranks/{mix}/step"
    return [
        record("dynamic_cp", case, name, value, unit, baseline=baseline)
        for name, (unit, value, baseline) in values.items()
    ]


def same(told: Sequence[dict[str, float]], tolerance: float) -> str:
    """Return what all steps tell, and how far they are apart. SystemExit unless it is the same, up to rounding."""
    found = []
    for name in told[0]:
        values = [one[name] for one in told]
        found.append(f"{name} {values[0]:.4g} ± {max(values) - min(values):.0e}")
        near = 1e-5 if name == "loss" else tolerance
        if not math.isclose(min(values), max(values), rel_tol=near, abs_tol=near):
            raise SystemExit(f"the steps differ in {name}, from {min(values)} to {max(values)}")
    return ", ".join(found)
