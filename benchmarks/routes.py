"""What replay of routes costs a trainer, and what routes cost a rollout: each beside the same without, and what routes weigh.

    python -m benchmarks.routes                        Qwen3-30B-A3B's layers, as many as fit, on one GPU
    python -m benchmarks.routes --rollout --turns 2    vLLM, with half of its layers
    python -m benchmarks.routes --shape tiny           a dry run in seconds, on a CPU; with --rollout where vLLM for CPU is installed

One engine trains steps of one pass for old log-probs and two updates, in turns: without replay, with the routes that this pass records
(R2), and with routes that came with the samples (R3). The latter are what the tokens chose by themselves, so that experts have the
same work in each. Values are medians over all steps but the first of a turn.

--rollout: vLLM through quintet's adapter generates the work of `benchmarks.rollout` and tells routes; the baseline is the same model
runner of vLLM without. On a GPU, where it would take its second one then, that is compared as well (`rollout/vllm/beside-second`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import rollout
from benchmarks.engine_work import MODELS, REAL, SMALL, TRAINED_FROM, Lengths
from benchmarks.engine_worker import OPTIMIZER, fill
from benchmarks.records import RESULTS, merged, record, write_records
from benchmarks.rollout_work import CONFIGS, cases_of
from quintet.controller.objective import sft_objective
from quintet.data.batch import make_batch, set_tokens, tokens
from quintet.engine.engine import Engine
from quintet.engine.routes import BatchRoutes, RecordedRoutes, ReplayedRoutes, Routes
from quintet.models import ModelShape, family_of
from quintet.packing import RankCell
from quintet.recipe import schema

CASES = ("off", "R2", "R3")
UPDATES = 2


@dataclass(frozen=True)
class Work:
    """Sizes of a step: the model's config, tokens of a micro-batch, how many a pass has, and how long sequences are."""

    config: dict[str, Any]
    tokens: int = 16384
    microbatches: int = 4
    lengths: Lengths = field(default=REAL)

    @property
    def shape(self) -> ModelShape:
        return family_of(self.config).shape_of(self.config)

    @property
    def tokens_per_pass(self) -> int:
        return self.tokens * self.microbatches


def work_of(shape: str, layers: int) -> Work:
    """Return the work on so many layers of Qwen3-30B-A3B, or on a tiny model of its kind."""
    config = MODELS["qwen3-30b-a3b"].config
    if shape == "qwen3-30b-a3b":
        return Work(config | {"num_hidden_layers": layers})
    return Work(CONFIGS["tiny-moe"], tokens=128, microbatches=2, lengths=SMALL)


class Loop:
    """The engine, and the one batch that it trains on."""

    def __init__(self, work: Work) -> None:
        self.work, self.objective = work, sft_objective()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.engine = Engine(
            work.shape,
            schema.Layout(),
            engine=schema.Engine(tokens_per_microbatch_per_rank=work.tokens, recompute="selective"),
            optimizer=OPTIMIZER,
            dtype="bf16",
        )
        fill(self.engine.shard_map(), self.device)
        self.engine.start_optimizer(OPTIMIZER, total_steps=1)
        draw = random.Random(0)
        rows = [work.lengths.row(work.tokens, draw) for _ in range(work.microbatches)]
        self.lengths, numbers = [n for row in rows for n in row], iter(range(sum(map(len, rows))))
        self.cells = [RankCell(list(islice(numbers, len(row)))) for row in rows]
        generator = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(0, work.shape.vocab_size, (n,), generator=generator) for n in self.lengths]
        self.batch = self._batch()
        natural = RecordedRoutes()
        self.engine.forward(self.batch, self.cells, routes=natural)
        # On one rank a row is its samples, one after another.
        told = torch.cat([row[: sum(lengths)] for row, lengths in zip(natural.kept, rows, strict=True)])
        self.batch = self._batch(routes=[one[:-1] for one in told.split(self.lengths)])

    def _batch(self, **fields: Any) -> Any:
        batch = make_batch(self.ids, [TRAINED_FROM] * len(self.ids), **fields)
        set_tokens(batch, "weights", tokens(batch, "loss_mask") / sum(n - TRAINED_FROM for n in self.lengths))
        return batch

    def step(self, how: str) -> float:
        """Take one step; its seconds."""
        start, recorded = time.perf_counter(), RecordedRoutes()
        self.engine.forward(self.batch, self.cells, 1.0, recorded if how == "R2" else self._told(how))
        for _ in range(UPDATES):
            routes = ReplayedRoutes(recorded) if how == "R2" else self._told(how)
            self.engine.forward_backward(self.batch, self.cells, self.objective, routes=routes)
            self.engine.optimizer_step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _told(self, how: str) -> Routes | None:
        return BatchRoutes(self.batch["routes"]) if how == "R3" else None


def measure(work: Work, turns: int, steps: int) -> list[dict[str, Any]]:
    """Let the cases take turns; their records."""
    loop = Loop(work)
    seconds: dict[str, list[float]] = {how: [] for how in CASES}
    for _ in range(turns):
        for how, found in seconds.items():
            found += [loop.step(how) for _ in range(steps)][1:]
            print(f"{how:4} {min(found):.4f} to {max(found):.4f} s", flush=True)
    rate = {
        how: (1 + UPDATES) * work.tokens_per_pass / statistics.median(found) for how, found in seconds.items()
    }
    made = [
        record("routes", f"train/{how}", "tokens_per_s", rate[how], "tokens/s", baseline=rate["off"])
        for how in ("R2", "R3")
    ]
    flat = tokens(loop.batch, "routes")
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    made.append(record("routes", "train/R3", "bytes_per_token", flat[0].nbytes, "bytes"))
    made.append(record("routes", "train/R3", "host_peak", host, "GiB"))
    return made


def measure_rollout(shape: str, turns: int, memory_fraction: float) -> list[dict[str, Any]]:
    """Let vLLM generate with routes and without, in turns, each time in a process of its own; the records."""
    name = "tiny-moe" if shape == "tiny" else shape
    options = ["--shape", name, "--memory-fraction", str(memory_fraction)]
    args = rollout.arguments(options)
    sides = ["vllm-routes", "vllm-first", *(["vllm"] if torch.cuda.is_available() else [])]
    cases = cases_of(name)
    seconds: dict[str, list[list[float]]] = {side: [[] for _ in cases] for side in sides}
    with tempfile.TemporaryDirectory(prefix="quintet-routes-") as directory:
        model = Path(directory) / "model"
        rollout.run_side("write", 1, model, args, options)
        for side in sides * turns:
            for found, rounds in zip(
                seconds[side], rollout.run_side(side, 1, model, args, options), strict=True
            ):
                found += [one for one, _ in rounds]
    made = []
    for at, case in enumerate(cases):
        tokens_made = sum(sum(lengths) for lengths in case.response_tokens())
        rate = {side: tokens_made / statistics.median(found[at]) for side, found in seconds.items()}
        for ending, beside in (("", "vllm-first"), ("beside-second", "vllm")):
            if beside in rate:
                told = "/".join(part for part in ("rollout/vllm", case.name, ending) if part)
                value, baseline = rate["vllm-routes"], rate[beside]
                made.append(record("routes", told, "tokens_per_s", value, "tokens/s", baseline=baseline))
    return made


def main(argv: list[str] | None = None) -> None:
    """Measure, print the records, and keep them where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=["qwen3-30b-a3b", "tiny"], default="qwen3-30b-a3b")
    parser.add_argument(
        "--layers", type=int, default=6, help="of its 48; 6 fit a GPU of 141 GB with their optimizer"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a turn, the first of which does not count")
    parser.add_argument(
        "--write", action="store_true", help="keep the records in benchmarks/results/routes.json"
    )
    parser.add_argument("--rollout", action="store_true", help="measure vLLM, in place of a trainer")
    parser.add_argument("--memory-fraction", type=float, default=0.8, help="of the GPU, for vLLM")
    args = parser.parse_args(argv)
    if args.rollout:
        made = measure_rollout(args.shape, args.turns, args.memory_fraction)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        made = measure(work_of(args.shape, args.layers), args.turns, args.steps)
        dist.destroy_process_group()
    for one in made:
        beside = f", {one['value'] / one['baseline'] - 1:+.2%} beside none" if one["baseline"] else ""
        print(f"{one['case']} {one['metric']}: {one['value']:,.1f} {one['unit']}{beside}")
    if args.write:
        file = RESULTS / "routes.json"
        write_records(file, merged(file, made))
    print(json.dumps([one["case"] for one in made]))


if __name__ == "__main__":
    main()
