"""Training throughput with products in 8 bits (engine.fp8), beside bf16 on the same packed rows.

    python -m benchmarks.fp8                               8B-shaped, 8 of 36 layers, one GPU, blockwise and tensorwise
    python -m benchmarks.fp8 --shape 30b-a3b               30B-A3B-shaped, 4 of 48 layers
    python -m benchmarks.fp8 --layers 4 8                  two depths, and by a line through both all 36 layers
    python -m benchmarks.fp8 --gpus 4 --recompute full --sequential    all layers of 8B, one side at a time
    python -m benchmarks.fp8 --prove                       first: is what it computes right? (benchmarks/fp8_proof.py)
    python -m benchmarks.fp8 --shape tiny                  a dry run on a CPU: both sides in bf16, nothing is recorded

Random weights, TransformerEngine's layers, bf16 with fp32 main gradients and masters, distributed optimizer. Each side has processes of
its own and they take turns on the GPU. A model that is too large is cut in depth, to what the card holds of it, and the case says so:
layers8of36. Embedding and head stay in bf16 and weigh more the fewer layers there are; so of several depths the case by-layers4-8of36 is
what all layers come to by a line through the seconds of a step. Values are medians over all measured steps.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine_work import MODELS, Setup, setup_of
from benchmarks.options import parse_layout, positive_int
from benchmarks.pairs import in_turns
from benchmarks.records import RESULTS, ROOT, device_name, merged, record, write_records
from benchmarks.room import card_bytes, depth_of

SHAPES = {"8b": "qwen3-8b", "30b-a3b": "qwen3-30b-a3b", "tiny": "tiny"}
FITTING = {("8b", 1): 8, ("8b", 4): 16, ("30b-a3b", 1): 4, ("30b-a3b", 4): 12}
"""Layers of a shape that so many H200s train while the other side's weights, gradients and optimizer state wait beside them; others have
all."""
LOSS_APART = 0.02
UNITS = {"tokens_per_s": "tokens/s", "peak_gib": "GiB"}
AIMS = {"8b": 1.42, "30b-a3b": 1.10}
"""By shape: tokens/s over those of bf16, of all layers. 1.34 to 1.42 and 1.01 were published."""


class Found(NamedTuple):
    """What a pair came to: seconds of a step and GiB, of either side."""

    pair: tuple[Setup, Setup]
    seconds: tuple[float, float]
    peaks: tuple[float, float]


def case(shape: str, setup: Setup) -> str:
    """The record's case: shape, GPUs and layout, depth, recipe."""
    whole = MODELS[setup.model].shape.layers
    sizes = [k if v is True else f"{k}{v}" for k, v in setup.layout.items() if v]
    parts = [shape, "-".join([f"gpus{setup.gpus}", *sizes])]
    if setup.layers not in (None, whole):
        parts.append(f"layers{setup.layers}of{whole}")
    if setup.recompute != "none":
        parts.append(f"recompute-{setup.recompute}")
    parts += setup.own_size()
    return "/".join([*parts, setup.engine.get("fp8") or "bf16"])


def setups(args: argparse.Namespace, card: int | None = None) -> list[list[tuple[Setup, Setup]]]:
    """Of each recipe the pairs that take turns, one a depth: in 8 bits, and in bf16. card: bytes of a GPU, None where they are not known.
    SystemExit for a depth that it does not hold."""
    layout = args.layout or ({"ep": args.gpus} if args.shape == "30b-a3b" and args.gpus > 1 else {})
    tiny = args.shape == "tiny"
    plain = setup_of(
        SHAPES[args.shape],
        backend="portable" if tiny else "transformer_engine",
        gpus=args.gpus,
        layout=layout,
        recompute=args.recompute,
        tokens=args.tokens,
        microbatches=args.microbatches,
    )
    if tiny:
        return [[(replace(plain, layers=layers),) * 2 for layers in args.layers or [None]]]
    whole = MODELS[plain.model].shape.layers
    most = whole if args.sequential else FITTING.get((args.shape, args.gpus), whole)
    found = []
    for fp8 in args.fp8 or ("blockwise", "tensorwise"):
        sides = replace(plain, engine={"fp8": fp8}), plain
        depths = [depth_of(sides, one, most, card, args.sequential) for one in args.layers or [None]]
        found.append([(replace(sides[0], layers=one), replace(plain, layers=one)) for one in depths])
    return found


def measure(shape: str, pair: tuple[Setup, Setup], args: argparse.Namespace) -> Found:
    """Let both sides take turns, and tell what they came to. SystemExit for losses that differ."""
    ours, theirs = in_turns([(case(shape, setup), setup) for setup in pair], args)
    found = Found(pair, (ours.seconds, theirs.seconds), (ours.peak_gib, theirs.peak_gib))
    apart = ours.losses[0] / theirs.losses[0] - 1
    tell(case(shape, pair[0]), shape, pair[0], found.seconds)
    print(f"  first loss {apart:+.2%}; {ours.peak_gib:.1f} GiB, bf16 {theirs.peak_gib:.1f}", flush=True)
    if not math.isfinite(apart) or abs(apart) > LOSS_APART:
        raise SystemExit(f"the first losses are {apart:+.2%} apart, and {LOSS_APART:.0%} may be")
    return found


def tell(name: str, shape: str, setup: Setup, seconds: tuple[float, float]) -> None:
    """Print tokens a second of both sides, and the aim, where a model has all its layers."""
    ours, theirs = (setup.tokens_per_step / one for one in seconds)
    aim = ""
    if shape in AIMS:
        whole = setup.layers in (None, MODELS[setup.model].shape.layers)
        reached = "reached" if ours / theirs >= AIMS[shape] else "missed"
        aim = f" (aim: {AIMS[shape]:.2f} of all layers{', ' + reached if whole else ''})"
    print(f"{name}: {ours:,.0f} tokens/s, {ours / theirs:.3f}x of bf16's {theirs:,.0f}{aim}", flush=True)


def records_of(shape: str, found: Found) -> list[dict[str, Any]]:
    """The records of a pair; none of a dry run."""
    if not found.pair[0].engine:
        return []
    name, tokens = case(shape, found.pair[0]), found.pair[0].tokens_per_step
    rates = [tokens / seconds for seconds in found.seconds]
    return [
        record("fp8", name, metric, ours, UNITS[metric], baseline=theirs)
        for metric, (ours, theirs) in (("tokens_per_s", rates), ("peak_gib", found.peaks))
    ]


def fitted(shape: str, depths: list[Found]) -> tuple[str, Setup, tuple[float, float]]:
    """All layers of a model by a line through the seconds that a step takes with fewer, by least squares: case, setup, and seconds of
    either side. Embedding, head and what else is not of a layer are in the line's constant."""
    layers = [one.pair[0].shape.layers for one in depths]
    whole = replace(depths[0].pair[0], layers=None)
    seconds = []
    for side in range(2):
        line = statistics.linear_regression(layers, [one.seconds[side] for one in depths])
        seconds.append(line.intercept + line.slope * whole.shape.layers)
    start, _, recipe = case(shape, whole).rpartition("/")
    name = f"{start}/by-layers{'-'.join(map(str, layers))}of{whole.shape.layers}/{recipe}"
    return name, whole, (seconds[0], seconds[1])


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), help="whose sizes the model has (default 8b; of --prove both)")
    add("--fp8", choices=["blockwise", "tensorwise"], action="append", help="may be repeated (default: both)")
    add("--gpus", type=positive_int, default=1, help="ranks, one GPU each, on this machine (default 1)")
    add("--layout", type=parse_layout, default={}, help="mesh axes, such as tp=2,sp=true,ep=2")
    add(
        "--layers",
        type=positive_int,
        nargs="+",
        help="depth (default: what the card holds twice, with --sequential once); several: each, and a line to all layers",
    )
    add("--recompute", choices=["none", "full"], default="none")
    add("--tokens", type=positive_int, help="tokens of a micro-batch on a rank (default 16384)")
    add("--microbatches", type=positive_int, default=4, help="of a step on a rank (default 4)")
    add("--rounds", type=positive_int, default=3, help="how often each side takes its turn (default 3)")
    add("--steps-per-turn", type=positive_int, default=3, help="measured steps of a turn (default 3)")
    add("--sequential", action="store_true", help="start a side anew for each turn: for what fits only once")
    add("--timeout-s", type=float, default=300.0, help="longest silence of a rank (default 300)")
    add("--prove", action="store_true", help="run benchmarks/fp8_proof.py instead, of --shape and --fp8")
    add("--out", type=Path, default=RESULTS / "fp8.json", help="records are merged into this file")
    args = parser.parse_args(argv)
    if args.shape == "tiny" and args.fp8:
        parser.error("--shape tiny is a dry run in bf16: leave --fp8 out")
    if args.prove:
        kept = {"prove", "shape", "fp8", "out"}
        if of_turns := [
            one for one in vars(args) if one not in kept and getattr(args, one) != parser.get_default(one)
        ]:
            parser.error(
                f"--prove is of one GPU and sizes of its own: leave --{', --'.join(of_turns).replace('_', '-')} out"
            )
        return args
    args.shape = args.shape or "8b"
    most = MODELS[SHAPES[args.shape]].shape.layers
    for layers in args.layers or ():
        if not 0 < layers <= most:
            parser.error(f"--layers {layers}: the shape has {most}")
    if len(set(args.layers or ())) < len(args.layers or ()):
        parser.error("--layers: a line goes through different depths; name each once")
    return args


def prove(args: argparse.Namespace) -> int:
    """Run the proof in a process of its own; its exit status."""
    words = ["--tiny"] if args.shape == "tiny" else ["--out", str(args.out.resolve())]
    words += ["--shape", args.shape] if args.shape not in (None, "tiny") else []
    for fp8 in args.fp8 or ():
        words += ["--fp8", fp8]
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.fp8_proof", *words], cwd=ROOT, check=False
    ).returncode


def main(argv: list[str] | None = None) -> int:
    """Measure, or prove. What a pair came to is written before the next begins."""
    args = arguments(argv)
    if args.prove:
        return prove(args)
    if args.shape != "tiny":
        if not device_name():
            print("no GPU was found; --shape tiny tries the plumbing without one", file=sys.stderr)
            return 1
        if (there := gpus_here()) < args.gpus:
            print(f"--gpus {args.gpus}: this machine has {there}", file=sys.stderr)
            return 1
    for pairs in setups(args, card_bytes()):
        depths = []
        for pair in pairs:
            depths.append(measure(args.shape, pair, args))
            keep(args.out, records_of(args.shape, depths[-1]))
        if len(depths) > 1:
            name, whole, seconds = fitted(args.shape, depths)
            tell(name, args.shape, whole, seconds)
            ours, theirs = (whole.tokens_per_step / one for one in seconds)
            made = [record("fp8", name, "tokens_per_s", ours, UNITS["tokens_per_s"], baseline=theirs)]
            keep(args.out, made if whole.engine else [])
    return 0


def gpus_here() -> int:
    """The GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def keep(file: Path, made: list[dict[str, Any]]) -> None:
    """Merge records into a file."""
    if not made:
        print("  a dry run: both sides in bf16, nothing is recorded", flush=True)
        return
    write_records(file, merged(file, made))
    print(f"  written to {file}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
