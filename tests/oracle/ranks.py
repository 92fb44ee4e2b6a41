"""What one rank of a case does: the functions that the pool runs. They report pieces; `compare` puts them together.

quintet's engine is imported when a function runs, so that this module can be named without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.algorithms.aggregation import Tally
from quintet.packing.align import alignment_of
from quintet.packing.plan import Cell, Plan, RankCell, plan_microbatches, rank_cells
from quintet.recipe.derived import moe_layers_of
from tests.oracle.cases import Case
from tests.oracle.data import (
    ENTROPY_WEIGHT,
    PROMPT,
    TEMPERATURE,
    ahead_counts,
    loss_mask,
    returns,
    routes,
    token_ids,
    trained_tokens,
)

Piece = tuple[str, tuple[tuple[int, int], ...], Tensor]
"""(name on the hub, box of the full tensor, what is in the box)."""


@dataclass
class Report:
    """What one rank says of a case.

    samples: of the first batch, the ones this rank's cells have. outputs: of the forward pass over them, flat over
    their tokens; None where the rank has none. losses: this rank's share at each step, 0 where another rank reports
    it. norms: of the gradients at each step. gradients: of the first step. parameters: after the last one, with the
    buffers that are stored beside them.
    """

    samples: list[int]
    outputs: tuple[Tensor, ...] | None
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Piece] = field(default_factory=list)
    parameters: list[Piece] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    """What this rank tells of each step."""
    ahead_norms: list[float] = field(default_factory=list)
    """Of the gradients of layers for multi-token prediction."""
    balance: list[dict[str, float]] = field(default_factory=list)
    """What this rank tells of the load of experts at each step."""


BUCKET_ELEMENTS = 2000
ROW_WASTE = 1.0
"""Rows of few sizes, where rows are so short that any size but a few would be the row's own."""


class Objective:
    """The losses of `tests.oracle.reference`, as this micro-batch's share of the mini-batch's."""

    def __init__(self, head: str, tokens: int) -> None:
        self.head, self.tokens = head, tokens

    def __call__(self, outputs: Any, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.head == "value":
            off = (outputs.values - fields["returns"]) ** 2
        else:
            off = -(outputs.logprobs + ENTROPY_WEIGHT * outputs.entropy)
        return (fields["loss_mask"] * off).sum() / self.tokens, {}


def engine_of(case: Case, path: Path, *, trained: bool = True, **how: Any) -> Any:
    """The engine of a case on this rank, weights loaded. how: what it is made with instead."""
    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe.lora import lora_shape

    recipe, shape = case.recipe(path), read_shape(path)
    settings = {
        "engine": recipe.engine,
        "optimizer": recipe.optimizer if trained else None,
        "dtype": case.dtype,
        "total_steps": len(case.batches),
        "lora": lora_shape(recipe, shape),
        "mtp": recipe.mtp,
    }
    # Buckets of a few parameters, where a model of this size would be one.
    with mock.patch("quintet.plan.parameters.bucket_elements", return_value=BUCKET_ELEMENTS):
        made = Engine(shape, recipe.layout, **(settings | how))
    made.load_hf(path, adapters=recipe.lora.path if recipe.lora else None)
    return made


def share(engine: Any, batch: int, mixed: bool = False) -> tuple[Any, list[RankCell], list[int]]:
    """This dp rank's samples of a batch, this rank's cells as positions in them, and which samples they are."""
    from quintet.data.batch import make_batch, select

    ids = token_ids(batch)
    lengths = [len(one) for one in ids]
    masks = [loss_mask(n, ahead=engine.shape.mtp_layers > 0) for n in lengths]
    fields: dict[str, Any] = {"loss_mask": masks, "returns": [returns(n) for n in lengths]}
    if engine.shape.moe is not None:  # whether or not they are replayed
        fields["routes"] = stage_routes(engine, batch)
    whole = make_batch(ids, [PROMPT] * len(ids), **fields)
    sizes, dp = engine.mesh.sizes, engine.mesh.at("dp")
    budget = engine.recipe.tokens_per_microbatch_per_rank
    align = alignment_of(engine.layout, sizes.cp, engine.recipe)
    plan = plan_microbatches(lengths, dp=sizes.dp, budget=budget, alignment=align, cp=sizes.cp)
    if mixed:
        plan = Plan([recut(row, k) for k, row in enumerate(plan.rounds)], plan.block)
    cells = rank_cells(plan.local(dp), engine.mesh.at("cp"))
    return select(whole, plan.samples_of(dp)), cells, plan.samples_of(dp)


def stage_routes(engine: Any, batch: int) -> list[Tensor]:
    """What a rollout told of a batch's samples, for the layers with experts of this rank's stage."""
    shape, mesh = engine.shape, engine.mesh
    mine = moe_layers_of(engine.layout, shape, mesh.at("pp"))
    places = [shape.moe_layers.index(layer) for layer in mine]
    told = routes(batch, len(shape.moe_layers), shape.moe.experts, shape.moe.top_k)
    return [one[:, places] for one in told]


def cuts(size: int) -> list[list[int]]:
    """All ways to cut a block into aligned groups of halves: the sizes of these, in the order of their ranks."""
    if size == 1:
        return [[1]]
    return [[size], *([*a, *b] for a in cuts(size // 2) for b in cuts(size // 2))]


def recut(cells: list[Cell], number: int) -> list[Cell]:
    """The same samples, the blocks cut in another way in each round, and in the same round each in another."""
    found = []
    for block, cell in enumerate(cells):
        ways = cuts(cell.cp)
        sizes = ways[(number + block) % len(ways)]
        begin = cell.ranks.start
        for n, size in enumerate(sizes):
            found.append(Cell(cell.samples[n :: len(sizes)], range(begin, begin + size)))
            begin += size
    return found


class Training:
    """A case in training on this rank, a step at a time."""

    def __init__(self, case: Case, path: Path, **how: Any) -> None:
        self.case = case
        self.engine = engine_of(case, path, **how)
        self.report = evaluate(self.engine, case)
        self._recorded = {b: self._record(b) for b in case.batches} if replays(case, "old") else {}

    def _record(self, batch: int) -> Any:
        from quintet.engine.routes import RecordedRoutes

        mine, cells, _ = share(self.engine, batch, self.case.mixed)
        recorded = RecordedRoutes()
        self.engine.forward(mine, cells, TEMPERATURE, recorded)
        return recorded

    def _routes(self, batch: int, mine: Any) -> Any:
        """What an update on a batch is told of routes."""
        from quintet.engine.routes import ReplayedRoutes

        return ReplayedRoutes(self._recorded[batch]) if self._recorded else told_routes(self.case, mine)

    def step(self, batch: int) -> None:
        """One optimizer step, and what the trainer does around generation: offload and reload."""
        from quintet.engine.ahead import ahead_losses

        engine, report = self.engine, self.report
        mine, cells, _ = share(engine, batch, self.case.mixed)
        counts = ahead_counts(batch, engine.depths) if engine.depths else [trained_tokens(batch)]
        objective, ahead = Objective(self.case.head, counts[0]), ahead_losses(engine.mtp, counts)
        routes = self._routes(batch, mine)
        result = engine.forward_backward(mine, cells, objective, TEMPERATURE, ahead, routes)
        if result is not None and engine.mesh.at("tp") == 0:
            report.tallies.append(result.tally)
        report.losses.append(result.loss if result is not None and engine.mesh.at("tp") == 0 else 0.0)
        if not report.gradients:
            if self.case.distributed_optimizer:
                gather_gradients(engine)
            report.gradients = pieces(engine, "main_grad")
        stepped = engine.optimizer_step()
        report.norms.append(stepped["grad_norm"])
        report.ahead_norms.append(stepped.get("mtp/grad_norm", 0.0))
        load = engine.expert_load()
        report.balance.append({} if load is None else load.metrics())
        recipe = engine.recipe
        engine.offload(
            params=recipe.offload_params, grads=recipe.offload_grads, optimizer=recipe.offload_optimizer
        )
        engine.reload()

    def finish(self) -> Report:
        """The report. The engine is of no use any more."""
        self.report.parameters = pieces(self.engine, "param")
        # Hooks on gradients, and what optimizer and token dispatcher keep of the graph, are cycles through C++, which
        # Python does not collect; hundreds of cases share these processes.
        for chunk in self.engine._wrapped:
            vars(chunk).clear()
        return self.report


def train(case: Case, path: Path, mistake: str | None = None, steps: int | None = None) -> Report:
    """A forward pass over the first batch, then one optimizer step on each batch, or on so many.

    mistake: the name of one of `tests.oracle.mistakes`, made for as long as this runs.
    """
    from tests.oracle.mistakes import made

    with made(mistake), mock.patch("quintet.packing.align.ROW_WASTE", ROW_WASTE):
        training = Training(case, path)
        for batch in case.batches[:steps]:
            training.step(batch)
        return training.finish()


class WatchedSend:
    """A request of a send that must be waited for before its tensor is given up."""

    def __init__(self, request: Any, tensor: Tensor) -> None:
        self.request, self.tensor, self.shape = request, tensor, tensor.shape

    def wait(self) -> None:
        assert self.tensor.shape == self.shape, "freed while it was sent"
        self.request.wait()


def train_watching_sends(case: Case, path: Path) -> tuple[Report, int]:
    """As `train`, and the number of sends of which each still had its data when it was waited for."""
    from megatron.core.pipeline_parallel import p2p_communication

    real, sends = p2p_communication._p2p_ops, 0

    def watched(**tensors: Any) -> dict[str, Any]:
        nonlocal sends
        requests = real(**tensors)
        for way in {"send_next", "send_prev"} & set(requests):
            requests[way] = WatchedSend(requests[way], tensors[f"tensor_{way}"])
            sends += 1
        return requests

    p2p_communication._p2p_ops = watched
    try:
        return train(case, path), sends
    finally:
        p2p_communication._p2p_ops = real


def train_together(cases: Sequence[Case], paths: Sequence[Path], frozen: Case, path: Path) -> list[Report]:
    """Several models in layouts of their own in one process, trained in turns, beside one that is only evaluated.

    Returns the reports of those in training, then that of the frozen one before the first and after the last step.
    """
    reference = engine_of(frozen, path, trained=False)
    before = evaluate(reference, frozen)
    trainings = [Training(case, where) for case, where in zip(cases, paths, strict=True)]
    for batch in frozen.batches:
        for training in trainings:
            training.step(batch)
    return [*(training.finish() for training in trainings), before, evaluate(reference, frozen)]


def evaluate_alone(case: Case, path: Path) -> tuple[Report, list[str]]:
    """A forward pass of an engine without an optimizer, and what it holds that only training needs."""
    engine = engine_of(case, path, trained=False)
    report = evaluate(engine, case)
    held = [
        n
        for c in engine.chunks
        for n, p in c.named_parameters()
        if p.grad is not None or hasattr(p, "main_grad")
    ]
    wrapped = [type(chunk).__name__ for chunk in engine._wrapped if chunk not in engine.chunks]
    return report, held + wrapped


def evaluate(engine: Any, case: Case) -> Report:
    """A forward pass over the case's first batch."""
    from quintet.data.batch import sample_ids

    mine, cells, samples = share(engine, case.batches[0], case.mixed)
    outputs = engine.forward(mine, cells, TEMPERATURE, told_routes(case, mine))
    known = sorted(i for cell in cells for i in cell.samples)
    if outputs is None:
        return Report([samples[i] for i in known], None)
    here = torch.isin(sample_ids(mine), torch.tensor(known, dtype=torch.int64))
    names = ("values",) if case.head == "value" else ("logprobs", "entropy")
    return Report([samples[i] for i in known], tuple(getattr(outputs, name)[here] for name in names))


def replays(case: Case, what: str) -> bool:
    """Whether a case's updates replay these routes: a value model chooses by itself."""
    return case.replay == what and case.head == "lm"


def told_routes(case: Case, mine: Any) -> Any:
    """What a call is told of routes where a rollout told some."""
    from quintet.engine.routes import BatchRoutes

    return BatchRoutes(mine["routes"]) if replays(case, "rollout") else None


def pieces(engine: Any, of: str) -> list[Piece]:
    """What this rank holds of the parameters or of what is behind them, on the CPU."""
    return [(s.name, s.box, s.read().detach().cpu().clone()) for s in engine.shard_map(of)]


def gather_gradients(engine: Any) -> None:
    """The distributed optimizer leaves each rank that shares a bucket a slice of its sum: put them together again."""
    for chunk in engine._wrapped:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                mine = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
