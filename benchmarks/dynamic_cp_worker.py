"""One rank of the benchmark of dynamic context parallelism, told by its parent what to run: a line of JSON in, a line out.

    {"do": "batch", "lengths": [...]}                     samples of these lengths are what plans are of
    {"do": "step", "rounds": [[[samples, first, ranks]]]} → {"seconds": ..., "loss": ..., "norm": ..., "peak_gib": ...}
    {"do": "links", "mib": 256}                           → {"gb_s": ...}
    {"do": "plans", "experts": ..., "layout": ..., "engine": {}, "plans": 50} → {"worst": ..., "seconds": ...}
    {"do": "quit"}

All samples are of one batch on each rank: what is sent, and where, is not of this benchmark.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any, TextIO

import torch
import torch.distributed as dist

from benchmarks.dynamic_cp_work import Work, random_plan, work_of
from benchmarks.engine_work import TRAINED_FROM
from benchmarks.engine_worker import as_runs_take, fill, join, timed_together
from benchmarks.timing import launch_us
from quintet.controller.objective import sft_objective
from quintet.data.batch import make_batch, set_tokens
from quintet.data.batch import tokens as flat
from quintet.engine.engine import Engine
from quintet.packing.plan import Cell, Plan, rank_cells
from quintet.recipe import schema

STILL = schema.Optimizer(lr=1e-12, weight_decay=0.0)
"""Its steps take what any take, and weights stay what they are, so that all sides' losses can be compared."""
PLAN_SAMPLES, PLAN_LONGEST, PLAN_ROUNDS = 24, 96, 4


class Loop:
    """An engine in a layout, and the batch that plans are of."""

    def __init__(
        self,
        work: Work,
        layout: dict[str, Any],
        device: torch.device,
        old_logprobs: bool = False,
        **recipe: Any,
    ) -> None:
        self.work, self.device, self.objective = work, device, sft_objective()
        self.old_logprobs = old_logprobs
        recipe |= {"recompute": work.recompute, "tokens_per_microbatch_per_rank": work.most, **work.engine}
        where = schema.Layout(**layout)
        engine, _ = as_runs_take(schema.Engine(**recipe), where, work.model, work.dtype)
        self.engine = Engine(
            work.model,
            where,
            engine=engine,
            optimizer=STILL,
            dtype=work.dtype,
        )
        fill(self.engine.shard_map(), device)
        self.engine.start_optimizer(STILL, total_steps=1)
        self.batch: Any = None

    def take(self, lengths: list[int]) -> None:
        """Make the batch."""
        generator = torch.Generator().manual_seed(len(lengths))
        ids = [torch.randint(0, self.work.model.vocab_size, (n,), generator=generator) for n in lengths]
        self.batch = make_batch(ids, [TRAINED_FROM] * len(ids))
        trained = sum(n - TRAINED_FROM for n in lengths)
        set_tokens(self.batch, "weights", flat(self.batch, "loss_mask") / trained)

    def step(self, plan: Plan) -> tuple[float, float]:
        """Take a step; this rank's share of the loss, and the gradient norm."""
        mesh = self.engine.mesh
        cells = rank_cells(plan.rounds, mesh.at("dp") * mesh.sizes.cp + mesh.at("cp"))
        if self.old_logprobs:
            self.engine.forward(self.batch, cells)
        result = self.engine.forward_backward(self.batch, cells, self.objective)
        norm = self.engine.optimizer_step()["grad_norm"]
        return result.loss if result is not None else 0.0, norm


def serve(work: Work, old_logprobs: bool, answers: TextIO) -> None:
    """Answer the parent's commands until it says quit. old_logprobs: a step begins with a pass for them, by the same plan."""
    device = join()
    loop: Loop | None = None
    print(json.dumps({}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "quit":
            break
        if command["do"] == "engine":
            loop = Loop(work, work.layout, device, old_logprobs)
            groups_mib = loop.engine._groups_bytes / 2**20
            answer = {
                "layers": loop.engine.describe(),
                "groups_mib": groups_mib,
                "launch_us": launch_us(device),
            }
        elif command["do"] == "links":
            answer = {"gb_s": links(command["mib"], device)}
        elif command["do"] == "plans":
            loop = None
            answer = run_plans(command, device)
        else:
            assert loop is not None
            if command["do"] == "batch":
                loop.take(command["lengths"])
            else:
                answer = _step(loop, command["rounds"], device)
        print(json.dumps(answer), file=answers)
    dist.destroy_process_group()


def _step(loop: Loop, rounds: list[list[list[Any]]], device: torch.device) -> dict[str, Any]:
    plan = Plan(
        [[Cell(samples, range(first, first + ranks)) for samples, first, ranks in row] for row in rounds],
        loop.work.gpus,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, (loss, norm) = timed_together(lambda: loop.step(plan), device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"seconds": seconds, "loss": loss, "norm": norm, "peak_gib": peak / 2**30}


def links(mib: int, device: torch.device) -> float:
    """Return what a rank receives in an all-gather of so much from each, in GB/s."""
    ranks = dist.get_world_size()
    mine = torch.zeros(mib << 18, device=device)
    whole = torch.empty(ranks * len(mine), device=device)
    spent = []
    for _ in range(4):
        seconds, _ = timed_together(lambda: dist.all_gather_into_tensor(whole, mine), device)
        spent.append(seconds)
    return (ranks - 1) * mine.nbytes / min(spent[1:]) / 1e9


def run_plans(command: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Run random plans in a layout on a small model, and compare loss and gradient norm with those of whole blocks. Returns the
    largest relative difference, and seconds."""
    layout, recipe = command["layout"], command["engine"]
    shape = "tiny-moe" if command["experts"] else "tiny"
    work = work_of(shape, dist.get_world_size(), 4, None, PLAN_SAMPLES * PLAN_LONGEST)
    loop, generator, worst = Loop(work, layout, device, **recipe), random.Random(f"{layout}"), 0.0
    cp = layout["cp"]
    blocks = loop.engine.mesh.sizes.dp
    began = time.perf_counter()
    for _ in range(command["plans"]):
        lengths = [generator.randint(2, PLAN_LONGEST) for _ in range(generator.randint(1, PLAN_SAMPLES))]
        loop.take(lengths)
        whole = [Cell([], range(b * cp, (b + 1) * cp)) for b in range(blocks)]
        for sample in range(len(lengths)):
            whole[sample % blocks].samples.append(sample)
        rounds = random_plan(lengths, cp, blocks, generator.randint(1, PLAN_ROUNDS), generator)
        (loss, norm), (known, of_known) = (_told(loop, plan, device) for plan in (rounds, Plan([whole], cp)))
        worst = max(worst, abs(loss - known) / known, abs(norm - of_known) / of_known)
    return {"worst": worst, "seconds": time.perf_counter() - began}


def _told(loop: Loop, plan: Plan, device: torch.device) -> tuple[float, float]:
    """The loss of all ranks together, and the gradient norm."""
    loss, norm = loop.step(plan)
    total = torch.tensor([loss], device=device)
    dist.all_reduce(total)
    return float(total) / loop.engine.mesh.sizes.tp, norm
