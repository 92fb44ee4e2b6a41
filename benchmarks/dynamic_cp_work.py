"""The work of the benchmark of dynamic context parallelism: lengths with long tails, the plans that are compared, and what a
device's times say of the model of time. Imports without torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engine_work import MODELS, Lengths
from quintet.models import ModelShape, family_of
from quintet.packing.align import alignment
from quintet.packing.dynamic import plan_cells
from quintet.packing.plan import Cell, Plan, cell_sizes, plan_microbatches
from quintet.packing.time_model import CellCosts, plan_times
from quintet.plan.memory import Memory, rank_memory
from quintet.plan.setup import Place, Setup
from quintet.recipe import schema

LONG = Lengths(median=2048, sigma=1.2, shortest=64, longest=32768)
"""A log-normal body, with a tail that is cut at 32k."""
NVIDIA = Lengths(median=round(1024 * math.exp(-(1.5**2) / 2)), sigma=1.5, shortest=16, longest=8192)
"""NVIDIA's example: log-normal of mean 1,024 and sigma 1.5, none longer than 8,192."""
SHORT = Lengths(median=16, sigma=1.0, shortest=4, longest=128)

_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL = _SMALL | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512}
SMALL_EXPERTS = SMALL | {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Work:
    """A model and its samples. mixes: by name; a step has so many samples of each. most: tokens that a rank has memory for. engine:
    further keys of a recipe's section `engine`."""

    shape: str
    layers: int
    gpus: int
    experts: bool = False
    mixes: dict[str, tuple[Lengths, int]] = field(default_factory=dict)
    most: int = 16384
    dtype: str = "bf16"
    recompute: str = "selective"
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """Of the model, in Hugging Face's words."""
        if self.shape.startswith("tiny"):
            config = MODELS["qwen3-30b-a3b" if self.experts else "qwen3-8b"].config
            return config | (SMALL_EXPERTS if self.experts else SMALL) | {"num_hidden_layers": self.layers}
        return MODELS[self.shape].config | {"num_hidden_layers": self.layers}

    @property
    def model(self) -> ModelShape:
        return family_of(self.config).shape_of(self.config)

    @property
    def memory(self) -> Memory:
        """What the plan says of a rank that computes full rows."""
        engine = schema.Engine(recompute=self.recompute, tokens_per_microbatch_per_rank=self.most)  # type: ignore[arg-type]
        layout = schema.Layout(**self.layout)
        return rank_memory(
            Setup(self.model, layout, self.gpus, engine=engine, backend="transformer_engine"), Place()
        )

    @property
    def layout(self) -> dict[str, Any]:
        """All ranks are one block, and share the experts."""
        return {"cp": self.gpus, "dynamic_cp": self.gpus > 1, "ep": self.gpus if self.experts else 1}

    @property
    def coupled(self) -> int:
        return self.gpus if self.experts else 1

    @property
    def title(self) -> str:
        """Names the depth where it is not the model's, and further keys."""
        whole = MODELS[self.shape].config["num_hidden_layers"] if self.shape in MODELS else self.layers
        cut = "" if self.layers == whole else f"-{self.layers}layers"
        return "-".join([self.shape + cut, *(f"{key}-{value}" for key, value in self.engine.items())])

    def lengths(self, mix: str) -> list[int]:
        """Lengths of a step's samples, the same each time; the first is the longest that the mix has."""
        law, samples = self.mixes[mix]
        generator = random.Random(f"dynamic_cp {mix}")
        return [law.longest, *(law.one(generator) for _ in range(samples - 1))]


def work_of(shape: str, gpus: int, layers: int | None, samples: int | None, most: int | None) -> Work:
    """Return the work on a shape. layers, samples, most: in place of the shape's own."""
    if shape.startswith("tiny"):
        return Work(
            shape,
            layers or 2,
            gpus,
            experts=shape == "tiny-moe",
            mixes={"short": (SHORT, samples or 24)},
            most=most or 128,
            dtype="fp32",
            recompute="none",
        )
    mixes = {"tail32k": (LONG, samples or 16 * gpus), "nvidia": (NVIDIA, samples or 64 * gpus)}
    experts = shape == "qwen3-30b-a3b"
    # With optimizer and gradients in fp32 48 layers of experts over four GPUs leave no room for activations.
    depth = layers or (12 if experts else 36)
    return Work(shape, depth, gpus, experts, mixes, most or 16384)


@dataclass(frozen=True)
class Side:
    """A way to plan. cp: of the largest cells; budget: tokens of a rank."""

    cp: int
    budget: int
    dynamic: bool = False

    @property
    def name(self) -> str:
        return f"{'dynamic' if self.dynamic else 'static'} cp {self.cp}, {self.budget} tokens a rank"

    def plan(self, work: Work, lengths: Sequence[int], costs: CellCosts) -> Plan:
        """Return the plan of samples of these lengths on all ranks."""
        how: dict[str, Any] = {"dp": work.gpus // self.cp, "cp": self.cp, "budget": self.budget}
        if self.dynamic:
            return plan_cells(lengths, alignment=aligned, costs=costs, coupled=work.coupled, **how)
        quadratic, lockstep = costs.quadratic, work.coupled > self.cp
        return plan_microbatches(
            lengths, alignment=aligned(self.cp), quadratic=quadratic, lockstep=lockstep, **how
        )


def aligned(cp: int) -> Any:
    """The alignment of a row on so many ranks."""
    return alignment(cp=cp)


def smallest_budget(longest: int, cp: int) -> int:
    """Return the fewest tokens a rank that a sample fits on so many."""
    return aligned(cp).row([longest]) // cp


def candidates(work: Work, longest: int) -> list[Side]:
    """Return what a step may be planned by: first dynamic and static sized for the longest sample, at its budget; then each
    size of static cells, and dynamic ones, at the budgets that hold it and fit the memory, each twice the last."""
    base = smallest_budget(longest, work.gpus)
    sides = [Side(work.gpus, base, True), Side(work.gpus, base)]
    for cp in cell_sizes(work.gpus):
        budget = smallest_budget(longest, cp)
        while budget <= max(work.most, base):
            sides.append(Side(cp, budget))
            if cp == work.gpus:
                sides.append(Side(cp, budget, True))
            budget *= 2
    return list(dict.fromkeys(sides))


# the model of time, by what the device takes


class Point(NamedTuple):
    """What is timed: a row of sequences of one length, on each group of cp ranks."""

    cp: int
    length: int
    count: int

    def plan(self, ranks: int, rounds: int) -> tuple[Plan, list[int]]:
        """Return rounds of this row on all ranks, and the lengths of their samples."""
        numbers = iter(range(ranks * rounds * self.count))
        cells = [
            [
                Cell([next(numbers) for _ in range(self.count)], range(first, first + self.cp))
                for first in range(0, ranks, self.cp)
            ]
            for _ in range(rounds)
        ]
        return Plan(cells, ranks), [self.length] * (rounds * (ranks // self.cp) * self.count)

    def terms(self, ranks: int) -> list[float]:
        """What multiplies each constant: a micro-batch, tokens, their squares, and what is exchanged by the size of the cell."""
        padded = aligned(self.cp).padded(self.length)
        tokens, squares = self.count * padded, self.count * padded**2
        exchanged = [
            tokens * (self.cp - 1) / self.cp if size == self.cp else 0.0 for size in cell_sizes(ranks)[1:]
        ]
        return [1.0, tokens / self.cp, squares / self.cp, *exchanged]


def points(work: Work) -> list[Point]:
    """Return rows of many short sequences and of one long one, full, half and short, on groups of each size."""
    longest = max(law.longest for law, _ in work.mixes.values())
    budget = min(smallest_budget(longest, work.gpus), work.most)
    found = []
    for cp in cell_sizes(work.gpus):
        row = budget * cp
        short = max(row // 32, 2 * cp)
        found += [
            Point(cp, short, row // short),
            Point(cp, short, max(row // short // 4, 1)),
            Point(cp, row, 1),
        ]
        found += [Point(cp, row // 2, 1)]
    return list(dict.fromkeys(found))


TOKENS = 1
"""Which of a point's terms is that of tokens, in which others are told."""


def fit(found: Sequence[tuple[Point, float]], ranks: int) -> tuple[float, CellCosts]:
    """Return the seconds of a token and the other constants in tokens, by least squares of relative errors; none is negative.
    found: of each point the seconds of a micro-batch."""
    rows = np.array([[term / seconds for term in point.terms(ranks)] for point, seconds in found])
    others = [at for at in range(rows.shape[1]) if at != TOKENS]
    least, values = math.inf, [0.0] * rows.shape[1]
    for kept in chain.from_iterable(combinations(others, n) for n in range(len(others) + 1)):
        columns = [TOKENS, *kept]
        solved = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
        off = float(np.square(rows[:, columns] @ solved - 1).sum())
        if solved.min() >= 0 and solved[0] > 0 and off < least:
            least, values = off, [0.0] * rows.shape[1]
            for at, value in zip(columns, solved, strict=True):
                values[at] = float(value)
    fixed, token, quadratic, *exchange = values
    return token, CellCosts(
        fixed / token, quadratic / token, tuple(one / token for one in exchange) or (0.0,)
    )


def modelled(plan: Plan, work: Work, lengths: Sequence[int], costs: CellCosts) -> float:
    """Return the time that a plan is modelled to take, in tokens."""
    return plan_times(plan, lengths, costs, aligned, coupled=work.coupled)[0]


# plans that are as good as any other


def random_plan(
    lengths: Sequence[int], block: int, blocks: int, rounds: int, generator: random.Random
) -> Plan:
    """Return rounds of blocks that are cut at random, samples in any of the cells; some are left empty."""
    table = [
        [
            Cell([], where)
            for b in range(blocks)
            for where in _cut(range(b * block, (b + 1) * block), generator)
        ]
        for _ in range(rounds)
    ]
    cells = [cell for row in table for cell in row]
    for sample in range(len(lengths)):
        generator.choice(cells).samples.append(sample)
    return Plan(table, block)


def _cut(ranks: range, generator: random.Random) -> Iterator[range]:
    if len(ranks) == 1 or generator.random() < 0.4:
        yield ranks
        return
    half = len(ranks) // 2
    yield from _cut(ranks[:half], generator)
    yield from _cut(ranks[half:], generator)


def layouts_of_plans(gpus: int) -> list[tuple[bool, dict[str, Any], dict[str, Any]]]:
    """Return in which layouts random plans run, each with whether it is of a model with experts, and what its engine is told."""
    found: list[tuple[bool, dict[str, Any], dict[str, Any]]] = [
        (False, {"cp": gpus}, {}),
        (True, {"cp": gpus, "ep": 2}, {}),
        (False, {"cp": 2}, {"cp_comm": "all_to_all"}),
    ]
    if gpus >= 4:
        found.append((False, {"cp": gpus // 2, "pp": 2, "vpp": 2}, {}))
        found.append((True, {"cp": gpus // 2, "ep": gpus}, {}))
    return [(experts, layout | {"dynamic_cp": True}, engine) for experts, layout, engine in found]
