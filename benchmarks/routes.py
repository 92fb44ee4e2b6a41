"""What replay of routes costs a trainer, and what routes cost a rollout: each beside the same without, and what routes weigh.

    python -m benchmarks.routes                        Qwen3-30B-A3B's layers, as many as fit, on one GPU
    python -m benchmarks.routes --rollout --rounds 8   vLLM, with half of its layers
    python -m benchmarks.routes --shape tiny           a dry run in seconds, on a CPU; with --rollout where vLLM for CPU is installed

One engine trains short steps of one pass for old log-probs and two updates: in each round one without replay, one with the routes that
its first pass records (R2), and one with routes that came with the samples (R3), in an order that turns. The latter are what the tokens
chose by themselves, so that experts have the same work in each. An overhead is of the two steps of a round: its median over rounds, with
an interval that holds 95% of the medians of rounds drawn anew.

--rollout: vLLM through quintet's adapter generates the work of `benchmarks.rollout` and tells routes, in turns call by call with one that
tells none. With --write records of each case are kept as it is done.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import rollout
from benchmarks.engine_work import MODELS, REAL, SMALL, TRAINED_FROM, Lengths
from benchmarks.engine_worker import OPTIMIZER, fill
from benchmarks.options import positive_int
from benchmarks.records import RESULTS, merged, record, write_records
from benchmarks.rollout_work import CONFIGS
from quintet.controller.objective import sft_objective
from quintet.data.batch import make_batch, set_tokens, tokens
from quintet.engine.engine import Engine
from quintet.engine.routes import BatchRoutes, RecordedRoutes, ReplayedRoutes, Routes
from quintet.models import ModelShape, family_of
from quintet.packing.plan import RankCell
from quintet.recipe import schema

CASES = ("off", "R2", "R3")
UPDATES = 2


@dataclass(frozen=True)
class Work:
    """Sizes of a step: the model's config, tokens of a micro-batch, how many a pass has, and how long sequences are."""

    config: dict[str, Any]
    tokens: int = 16384
    microbatches: int = 2
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

    def step(self, how: str) -> Taken:
        """Take one step."""
        self._placing = 0.0
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.device.type == "cuda" else []
        start = time.perf_counter()
        for mark in marks[:1]:
            mark.record()
        recorded = RecordedRoutes()
        self.engine.forward(self.batch, self.cells, 1.0, recorded if how == "R2" else self._told(how))
        for _ in range(UPDATES):
            routes = self._timed(ReplayedRoutes(recorded)) if how == "R2" else self._told(how)
            self.engine.forward_backward(self.batch, self.cells, self.objective, routes=routes)
            self.engine.optimizer_step()
            if routes is not None:
                routes.parted()
        for mark in marks[1:]:
            mark.record()
        if marks:
            torch.cuda.synchronize()
        wall = time.perf_counter() - start
        return Taken(wall, marks[0].elapsed_time(marks[1]) / 1e3 if marks else wall, self._placing)

    def kernel_seconds(self, how: str) -> float:
        """Seconds that the device was busy in a step, however long it waited for the host in between."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step(how)
        return sum(one.self_device_time_total for one in profile.key_averages()) / 1e6

    def _told(self, how: str) -> Routes | None:
        return self._timed(BatchRoutes(self.batch["routes"])) if how == "R3" else None

    def _timed(self, routes: Routes) -> Routes:
        """Count what the host needs to cut a micro-batch's routes and to send them off."""
        place: Callable[..., Any] = routes.next

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return place(*args)
            finally:
                self._placing += time.perf_counter() - start

        routes.next = timed  # type: ignore[method-assign]
        return routes


class Taken(NamedTuple):
    """Seconds of a step: on the clock, between marks on the device, and of the host to place routes."""

    wall: float
    device: float
    placing: float


class Overhead(NamedTuple):
    """How much longer one side takes, in percent: the median over pairs, and the interval of 95% of medians of pairs drawn anew."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], draws: int = 2000) -> Overhead:
        """Return that of pairs of seconds: with, and without."""
        found = [100 * (one / other - 1) for one, other in pairs]
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(found, k=len(found))) for _ in range(draws))
        return cls(statistics.median(found), medians[draws // 40], medians[-draws // 40 - 1])

    def records(self, case: str, metric: str) -> list[dict[str, Any]]:
        """Print it, and return a record of each number."""
        print(
            f"{case} {metric}: {self.median:+.2f}%, 95% within {self.low:+.2f} to {self.high:+.2f}%",
            flush=True,
        )
        names = (metric, f"{metric}_low", f"{metric}_high")
        return [record("routes", case, name, value, "%") for name, value in zip(names, self, strict=True)]


def measure(work: Work, rounds: int) -> list[dict[str, Any]]:
    """Let the cases take turns; their records."""
    loop = Loop(work)
    for how in CASES:  # not counted
        loop.step(how)
    gc.collect()
    gc.disable()
    taken: dict[str, list[Taken]] = {how: [] for how in CASES}
    for number in range(rounds):
        for at in range(len(CASES)):
            how = CASES[(number + at) % len(CASES)]
            taken[how].append(loop.step(how))
        print(", ".join(f"{how} {found[-1].wall:.4f} s" for how, found in taken.items()), flush=True)
    gc.enable()
    busy = {how: loop.kernel_seconds(how) for how in CASES} if loop.device.type == "cuda" else {}
    tokens_made = (1 + UPDATES) * work.tokens_per_pass
    rate = {how: tokens_made / statistics.median(one.wall for one in found) for how, found in taken.items()}
    made = []
    for how in CASES[1:]:
        case, pairs = f"train/{how}", list(zip(taken[how], taken["off"], strict=True))
        made.append(record("routes", case, "tokens_per_s", rate[how], "tokens/s", baseline=rate["off"]))
        made += Overhead.of([(one.wall, off.wall) for one, off in pairs]).records(case, "overhead")
        fastest = [min(one.wall for one in taken[side]) for side in (how, "off")]
        made.append(record("routes", case, "fastest_s", fastest[0], "s", baseline=fastest[1]))
        placing = 1e3 * statistics.median(one.placing for one in taken[how])
        made.append(record("routes", case, "host_ms", placing, "ms"))
        if busy:
            made += Overhead.of([(one.device, off.device) for one, off in pairs]).records(
                case, "device_overhead"
            )
            made.append(record("routes", case, "kernel_s", busy[how], "s", baseline=busy["off"]))
    flat = tokens(loop.batch, "routes")
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    made.append(record("routes", "train/R3", "bytes_per_token", flat[0].nbytes, "bytes"))
    made.append(record("routes", "train/R3", "host_peak", host, "GiB"))
    return made


def measure_rollout(shape: str, rounds: int, memory_fraction: float) -> Iterator[list[dict[str, Any]]]:
    """Let vLLM generate with routes and without, call by call; the records of each case as it is done."""
    name = "tiny-moe" if shape == "tiny" else shape
    args = rollout.arguments(["--shape", name, "--memory-fraction", str(memory_fraction)])
    for case, pairs in rollout.in_turns(args, ("vllm-routes", "vllm"), rounds):
        told = "/".join(part for part in ("rollout/vllm", case.name) if part)
        tokens_made = sum(sum(lengths) for lengths in case.response_tokens())
        value, baseline = (tokens_made / statistics.median(side) for side in zip(*pairs, strict=True))
        made = [record("routes", told, "tokens_per_s", value, "tokens/s", baseline=baseline)]
        yield made + Overhead.of(pairs).records(told, "overhead")


def main(argv: list[str] | None = None) -> None:
    """Measure, print the records, and keep them where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=["qwen3-30b-a3b", "tiny"], default="qwen3-30b-a3b")
    parser.add_argument(
        "--layers", type=positive_int, default=6, help="of its 48; 6 fit a GPU of 141 GB with their optimizer"
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=40, help="in each of which every side has its turn"
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the records in benchmarks/results/routes.json"
    )
    parser.add_argument("--rollout", action="store_true", help="measure vLLM, in place of a trainer")
    parser.add_argument(
        "--memory-fraction", type=float, default=0.4, help="of the GPU, for each of two vLLMs"
    )
    args = parser.parse_args(argv)
    cases: Iterable[list[dict[str, Any]]]
    if args.rollout:
        cases = measure_rollout(args.shape, args.rounds, args.memory_fraction)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        cases = [measure(work_of(args.shape, args.layers), args.rounds)]
        dist.destroy_process_group()
    for made in cases:
        tell(made)
        if args.write:
            file = RESULTS / "routes.json"
            write_records(file, merged(file, made))


def tell(made: list[dict[str, Any]]) -> None:
    """Print records."""
    for one in made:
        beside = f", {one['value'] / one['baseline'] - 1:+.2%} beside none" if one["baseline"] else ""
        digits = ".4g" if one["unit"] in ("s", "ms", "%") else ",.1f"
        print(f"{one['case']} {one['metric']}: {one['value']:{digits}} {one['unit']}{beside}")


if __name__ == "__main__":
    main()
