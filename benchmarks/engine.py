"""Training throughput, MFU and memory of quintet's engine, beside plain megatron-core on the same packed rows.

    python -m benchmarks.engine                            Qwen2.5-1.5B, both back ends, one GPU
    python -m benchmarks.engine --backend te --profile     and which kernels take the time
    python -m benchmarks.engine --shape qwen3-8b --gpus 8 --layout tp=2,sp=true --backend te
    python -m benchmarks.engine --shape qwen3-30b-a3b --gpus 4 --layout ep=4 --layers 12 24 --balance forced
                                                           two depths, and by a line through both all 48 layers
    python -m benchmarks.engine --gpus 2 --layout pp=2 --stage-layers 15 13 --backend te
                                                           a stage with the head has fewer layers
    python -m benchmarks.engine --backend te --busy 16     on a loaded host: so many processes keep its CPUs busy
    python -m benchmarks.engine --shape tiny               a dry run in seconds, on a CPU

Random weights, bf16 with fp32 main gradients and master weights, distributed optimizer; a step is several packed
micro-batches forward and backward and one optimizer step, and every token but the first of a sequence is trained. Each
side has processes of its own; they are there at once and take turns on the GPU, so what slows the machine slows both.
Values are medians over all measured steps. What is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from benchmarks.busy import busy
from benchmarks.engine_recipe import OPTIONS, UNREAD, recipe_of
from benchmarks.engine_work import (
    MICROBATCHES,
    MODELS,
    TINY,
    Setup,
    parse_engine,
    peak_flops,
    setup_of,
)
from benchmarks.options import end_at_sigterm, need_gpus, parse_layout, positive_int
from benchmarks.records import RESULTS, device_name, merged, record, write_records
from benchmarks.sides import Side, answer_stream
from quintet.errors import UserError

SIDES = ("raw", "quintet")
UNSEEN = 2
"""Steps before the first that is measured, where those that are measured are to be new."""
BACKENDS = {"te": "transformer_engine", "portable": "portable"}
UNITS = {
    "mfu": "fraction",
    "tokens_per_s_per_gpu": "tokens/s",
    "tflop_per_s_per_gpu": "TFLOP/s",
    "peak_gib": "GiB",
}
Metrics = dict[str, dict[str, float]]
"""By side and metric."""


class Measured:
    """What a side's bursts came to."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.flops_per_s: list[float] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.peak_gib = 0.0
        self.versions: dict[str, str] = {}

    def add(self, answers: list[dict[str, Any]], setup: Setup) -> None:
        """A burst, as all ranks saw it: a step ends with its slowest rank; losses are shares."""
        seconds = [max(ranks) for ranks in zip(*(a["seconds"] for a in answers), strict=True)]
        steps = answers[0]["steps"]
        self.seconds += seconds
        self.flops_per_s += [setup.flops(k) / s for k, s in zip(steps, seconds, strict=True)]
        self.losses += [sum(ranks) for ranks in zip(*(a["losses"] for a in answers), strict=True)]
        self.norms += answers[0]["norms"]
        self.peak_gib = max(self.peak_gib, *(a["peak_gib"] for a in answers))

    def metrics(self, setup: Setup, peak: float | None) -> dict[str, float]:
        """By metric; no mfu without the card's peak."""
        flops_per_s = statistics.median(self.flops_per_s)
        seconds = statistics.median(self.seconds)
        return _metrics(setup, seconds, flops_per_s, peak) | {"peak_gib": self.peak_gib}


def _metrics(setup: Setup, seconds: float, flops_per_s: float, peak: float | None) -> dict[str, float]:
    """By metric, of steps that take so long."""
    found = {
        "s_per_step": seconds,
        "tokens_per_s_per_gpu": setup.tokens_per_step / setup.gpus / seconds,
        "tflop_per_s_per_gpu": flops_per_s / setup.gpus / 1e12,
    }
    return found if peak is None else found | {"mfu": flops_per_s / setup.gpus / peak}


class Turns:
    """The sides of one setup, taking turns; context manager, so that no process stays behind."""

    def __init__(self, setup: Setup, names: list[str], args: argparse.Namespace) -> None:
        self.setup, self.names, self.args = setup, names, args
        self.measured = {name: Measured() for name in names}
        self._sides: dict[str, Side] = {}

    def __enter__(self) -> Self:
        if not self.args.sequential:
            self._sides = {name: self._side(name) for name in self.names}  # starting at the same time
            try:
                for name in self.names:
                    self._ready(name)
            except BaseException:
                self._end(Side.kill)
                raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end(Side.kill if error[0] else Side.stop)

    def take(self, first: bool) -> None:
        """One burst of each side."""
        for name in self.names:
            fresh = first or self.args.sequential
            if self.args.sequential:
                self._sides[name] = self._side(name)
                self._ready(name)
            # Ragged rows are new to each measured step, as in a run; others have all been seen.
            warmup = 1 if not fresh else UNSEEN if self.setup.ragged else self.setup.steps + 1
            side = self._sides[name]
            with busy(self.setup.busy):
                told = side.ask(do="burst", warmup=warmup, steps=self.args.steps_per_turn)
            self.measured[name].add(told, self.setup)
            if self.args.sequential:
                self._sides.pop(name).stop()
            seconds = self.measured[name].seconds[-self.args.steps_per_turn :]
            loss, norm = self.measured[name].losses[-1], self.measured[name].norms[-1]
            print(
                f"  {name:8} {min(seconds):.3f} to {max(seconds):.3f} s/step, loss {loss:.4f}, gradient norm {norm:.4f}",
                flush=True,
            )

    def profile(self) -> None:
        for name, side in self._sides.items():
            with busy(self.setup.busy):
                table = side.ask(do="profile")[0]["table"]
            print(f"--- {name} ---\n{table}", flush=True)
            if self.args.profile_dir:
                self.args.profile_dir.mkdir(parents=True, exist_ok=True)
                file = self.args.profile_dir / f"{self.setup.case().replace('/', '-')}-{name}.txt"
                file.write_text(table)

    def _end(self, how: Callable[[Side], None]) -> None:
        for side in self._sides.values():
            how(side)

    def _side(self, name: str) -> Side:
        worker = ["benchmarks.engine", "--worker", name, "--setup", json.dumps(self.setup.asdict())]
        # Lets the communication of tp overlap with matrix products on GPUs before Blackwell.
        one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")}
        return Side(
            f"{name} ({self.setup.case()})",
            worker,
            ranks=self.setup.gpus,
            timeout_s=self.args.timeout_s,
            environment=one_queue if self.setup.size("tp") > 1 else {},
        )

    def _ready(self, name: str) -> None:
        told = self._sides[name].answer()
        self.measured[name].versions = told[0]["versions"]
        print(f"  {name:8} a launch every {max(one['launch_us'] for one in told):.1f} µs", flush=True)
        if told[0]["kernels"]:
            print(f"  {name:8} {told[0]['kernels']}", flush=True)


def measure(setup: Setup, names: list[str], args: argparse.Namespace) -> tuple[Metrics, dict[str, str]]:
    """Let the sides take turns, print what came out, and return it, and the versions of quintet's packages."""
    print(f"{setup.case()}: {setup.tokens_per_step} tokens a step, {describe_lengths(setup)}", flush=True)
    with Turns(setup, names, args) as turns:
        for turn in range(args.rounds):
            turns.take(first=turn == 0)
        if args.profile or args.profile_dir:
            turns.profile()
    check_same_work(turns.measured)
    peak = peak_of(setup)
    found = {name: side.metrics(setup, peak) for name, side in turns.measured.items()}
    tell(found)
    return found, turns.measured[names[-1]].versions


def fitted(setups: list[Setup], measured: list[Metrics]) -> tuple[Setup, Metrics]:
    """All layers of a model by a line through the seconds that a step takes with fewer, by least squares: the setup, and each side's
    metrics there. Embedding, head and what else is not of a layer are in the line's constant."""
    whole = replace(setups[0], layers=None)
    layers, steps = [one.shape.layers for one in setups], range(whole.steps)
    flops = statistics.mean(whole.flops(step) for step in steps)
    found = {}
    for side in measured[0]:
        line = statistics.linear_regression(layers, [one[side]["s_per_step"] for one in measured])
        seconds = line.intercept + line.slope * whole.shape.layers
        found[side] = _metrics(whole, seconds, flops / seconds, peak_of(whole))
    return whole, found


def peak_of(setup: Setup) -> float | None:
    """The card's dense bf16 peak, FLOP/s; None where it is not known, and of a dry run."""
    return None if setup.model in TINY else peak_flops(device_name())


def tell(found: Metrics) -> None:
    """Print what came out."""
    for name, metrics in found.items():
        print(f"  {name:8} " + ", ".join(f"{k} {v:,.3f}" for k, v in sorted(metrics.items())), flush=True)
    if set(found) == set(SIDES):
        ratio = found["quintet"]["tokens_per_s_per_gpu"] / found["raw"]["tokens_per_s_per_gpu"]
        print(f"  quintet / raw: {ratio:.3f}x tokens/s", flush=True)


def records_of(case: str, found: Metrics, versions: dict[str, str]) -> list[dict[str, Any]]:
    """The records, with both sides and a known GPU."""
    if set(found) != set(SIDES) or "mfu" not in found["quintet"]:
        return []
    ours, theirs = found["quintet"], found["raw"]
    made = [
        record("engine", case, metric, ours[metric], unit, baseline=theirs[metric])
        for metric, unit in UNITS.items()
        if metric in ours
    ]
    return [one | {"versions": one["versions"] | versions} for one in made]


def keep(out: Path, found: list[dict[str, Any]]) -> None:
    """Merge records into a file, and say so."""
    if found:
        write_records(out, merged(out, found))
        print(f"  written to {out}")


def check_same_work(measured: dict[str, Measured]) -> None:
    """SystemExit unless the sides' first losses and gradient norms are the same up to the rounding of bf16: from the
    same weights they then trained the same tokens."""
    if len(measured) < 2:
        return
    for name, tolerance in (("losses", 2e-3), ("norms", 3e-2)):
        ours, theirs = (getattr(side, name)[0] for side in measured.values())
        if not math.isclose(ours, theirs, rel_tol=tolerance):
            raise SystemExit(f"the sides did not do the same work: first {name} {ours:.5f} and {theirs:.5f}")


def describe_lengths(setup: Setup) -> str:
    lengths = sorted(n for step in range(setup.steps) for n in setup.lengths(step))
    law = MODELS[setup.model].lengths
    return (
        f"{setup.microbatches} micro-batches of {setup.tokens} a rank; sequences log-normal (median {law.median}, "
        f"sigma {law.sigma}) clipped to [{law.shortest}, {law.longest}]: drawn median {lengths[len(lengths) // 2]}, "
        f"mean {statistics.mean(lengths):.0f}"
    )


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=list(MODELS), default="qwen2.5-1.5b", help="whose sizes the model has")
    add("--backend", choices=list(BACKENDS), action="append", help="may be repeated (default: both)")
    add("--gpus", type=positive_int, default=1, help="ranks, one GPU each, on this machine (default 1)")
    add(
        "--layout",
        type=parse_layout,
        default={},
        help="mesh axes, such as tp=2,sp=true,ep=8; dp is what is left",
    )
    add(
        "--stage-layers",
        type=int,
        nargs="+",
        metavar="LAYERS",
        help="of each pipeline stage, as layout.stage_layers (default: equally many)",
    )
    add(
        "--recompute",
        choices=["none", "selective", "full"],
        default="none",
        help="activations computed again in the backward pass",
    )
    add(
        "--recompute-modules",
        type=lambda text: text.split(","),
        help="what selective computes again, with commas",
    )
    add(
        "--layers",
        type=positive_int,
        nargs="+",
        help="cut the model to so many; several: each, and a line to all of them",
    )
    add(
        "--balance",
        choices=["natural", "forced"],
        default="natural",
        help="of experts: as the routers choose, or tokens dealt to them in turn",
    )
    add(
        "--ragged",
        action="store_true",
        help="rows of random lengths, others in each step, as in a run; leave --steps out",
    )
    add(
        "--busy",
        type=positive_int,
        default=0,
        metavar="N",
        help="so many processes keep the CPUs busy beside each turn of either side: a loaded host",
    )
    add("--cpu-fraction", type=float, default=0.0, help="share of the optimizer's state on the CPU")
    add(
        "--engine",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further key of a recipe's section engine, of quintet's side alone; may be repeated",
    )
    add("--tokens", type=positive_int, help="tokens of a micro-batch on a rank (default: the shape's, 16384)")
    add(
        "--microbatches",
        type=positive_int,
        default=MICROBATCHES,
        help=f"micro-batches of a step on a rank (default {MICROBATCHES})",
    )
    add("--steps", type=positive_int, default=3, help="different steps, trained over and over (default 3)")
    add("--rounds", type=positive_int, default=3, help="how often each side takes its turn (default 3)")
    add("--steps-per-turn", type=positive_int, default=3, help="measured steps of a turn (default 3)")
    add("--only", choices=SIDES, help="one side alone; writes no records")
    add(
        "--sequential",
        action="store_true",
        help="start a side anew for each turn: for models that fit only once",
    )
    add("--profile", action="store_true", help="print each side's kernels by time")
    add("--profile-dir", type=Path, help="the same, and write the tables to this directory")
    add("--timeout-s", type=float, default=300.0, help="longest silence of a rank (default 300)")
    add("--out", type=Path, default=RESULTS / "engine.json", help="records are merged into this file")
    add("--worker", choices=SIDES, help=argparse.SUPPRESS)
    add("--setup", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.stage_layers:
        args.layout = args.layout | {"stage_layers": args.stage_layers}
    if args.sequential and (args.profile or args.profile_dir):
        parser.error("--profile needs sides that stay: leave --sequential out")
    if args.cpu_fraction and not args.worker and not device_name():
        parser.error("--cpu-fraction needs a GPU: on a CPU all of the optimizer is there")
    if args.ragged:
        args.steps = UNSEEN + args.rounds * (args.steps_per_turn + 1)
    if args.balance == "forced" and MODELS[args.shape].shape.moe is None:
        parser.error(f"--balance forced is of experts, and {args.shape} has none")
    if len({*(args.layers or ())}) < len(args.layers or ()):
        parser.error("--layers: name each depth once")
    whole = MODELS[args.shape].shape.layers
    if max(args.layers or (0,)) > whole:
        parser.error(f"--layers {max(args.layers)}: {args.shape} has {whole}")
    for key, equals, _ in (one.partition("=") for one in args.engine):
        if not equals:
            parser.error(f"--engine {key}: expected key=value")
        if key in OPTIONS:
            parser.error(f"--engine {key}: use {OPTIONS[key]}")
        if key in UNREAD:
            parser.error(f"--engine {key} changes nothing here: {UNREAD[key]}")
    backends = [] if args.worker else backends_of(args)
    try:
        for setup in itertools.chain.from_iterable(setups_of(args, backend) for backend in backends):
            with recipe_of(setup):
                pass  # refused in a recipe's words is what a recipe that says the same is refused for
    except UserError as error:
        parser.error(str(error))
    return args


def backends_of(args: argparse.Namespace) -> list[str]:
    """What is measured one after the other."""
    return args.backend or (["portable"] if args.shape in TINY else list(BACKENDS))


def setups_of(args: argparse.Namespace, backend: str) -> list[Setup]:
    """What is measured with a back end, by depth."""
    return [
        setup_of(
            args.shape,
            backend=BACKENDS[backend],
            gpus=args.gpus,
            layout=args.layout,
            recompute=args.recompute,
            recompute_modules=args.recompute_modules,
            layers=layers,
            balance=args.balance,
            ragged=args.ragged,
            busy=args.busy,
            cpu_fraction=args.cpu_fraction,
            engine=parse_engine(args.engine),
            tokens=args.tokens,
            microbatches=args.microbatches,
            steps=args.steps,
        )
        for layers in args.layers or [None]
    ]


def work(side: str, setup: Setup) -> None:
    """Be one rank of a side."""
    stream = answer_stream()
    if setup.backend == "portable":
        # Portable means that TransformerEngine is not there: megatron-core uses parts of it wherever it finds it.
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    from benchmarks.engine_worker import serve

    serve(side, setup, stream)


def main() -> None:
    args = arguments()
    if args.worker:
        work(args.worker, Setup(**args.setup))
        return
    if args.shape not in TINY:
        need_gpus(args.gpus, "--shape tiny")
    end_at_sigterm()
    names = [args.only] if args.only else list(SIDES)
    for backend in backends_of(args):
        setups = setups_of(args, backend)
        measured = []
        for setup in setups:
            metrics, versions = measure(setup, names, args)
            measured.append(metrics)
            keep(args.out, records_of(setup.case(), metrics, versions))
        if len(setups) > 1:
            whole, metrics = fitted(setups, measured)
            case = f"{whole.case()}/by-layers{'-'.join(str(one.layers) for one in setups)}"
            print(f"{case}: all {whole.shape.layers} layers, by a line through these")
            tell(metrics)
            keep(args.out, records_of(case, metrics, versions))


if __name__ == "__main__":
    main()
