"""Training throughput with products in 8 bits (engine.fp8), beside bf16 on the same packed rows.

    python -m benchmarks.fp8                               8B-shaped, 8 of 36 layers, one GPU, blockwise and tensorwise
    python -m benchmarks.fp8 --shape 30b-a3b               30B-A3B-shaped, 4 of 48 layers
    python -m benchmarks.fp8 --gpus 4 --recompute full --sequential    all layers of 8B, one side at a time
    python -m benchmarks.fp8 --prove                       first: is what it computes right? (benchmarks/fp8_proof.py)
    python -m benchmarks.fp8 --shape tiny                  a dry run on a CPU: both sides in bf16, nothing is recorded

Random weights, TransformerEngine's layers, bf16 with fp32 main gradients and masters, distributed optimizer. Each side has processes of
its own and they take turns on the GPU. A model that is too large is cut in depth, and the case says so: layers8of36. Values are
medians over all measured steps.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engine import device_name
from benchmarks.engine_work import MODELS, Setup, parse_layout, setup_of
from benchmarks.pairs import in_turns
from benchmarks.records import RESULTS, ROOT, merged, record, write_records

SHAPES = {"8b": "qwen3-8b", "30b-a3b": "qwen3-30b-a3b", "tiny": "tiny"}
FITTING = {("8b", 1): 8, ("8b", 4): 16, ("30b-a3b", 1): 4, ("30b-a3b", 4): 12}
"""Layers of a shape that so many H200s train while the other side's weights, gradients and optimizer state wait beside them; others have
all."""
LOSS_APART = 0.02
UNITS = {"tokens_per_s": "tokens/s", "peak_gib": "GiB"}


def case(shape: str, setup: Setup) -> str:
    """The record's case: shape, GPUs and layout, depth, recipe."""
    whole = MODELS[setup.model].shape.layers
    sizes = [k if v is True else f"{k}{v}" for k, v in setup.layout.items() if v]
    parts = [shape, "-".join([f"gpus{setup.gpus}", *sizes])]
    if setup.layers not in (None, whole):
        parts.append(f"layers{setup.layers}of{whole}")
    if setup.recompute != "none":
        parts.append(f"recompute-{setup.recompute}")
    return "/".join([*parts, setup.engine.get("fp8") or "bf16"])


def setups(args: argparse.Namespace) -> list[tuple[Setup, Setup]]:
    """Of each pair that takes turns: that in 8 bits, and that in bf16."""
    layers = args.layers or (None if args.sequential else FITTING.get((args.shape, args.gpus)))
    layout = args.layout or ({"ep": args.gpus} if args.shape == "30b-a3b" and args.gpus > 1 else {})
    plain = replace(
        setup_of(
            SHAPES[args.shape],
            backend="portable" if args.shape == "tiny" else "transformer_engine",
            gpus=args.gpus,
            layout=layout,
            recompute=args.recompute,
            tokens=args.tokens,
            microbatches=args.microbatches,
        ),
        layers=layers,
    )
    if args.shape == "tiny":
        return [(plain, plain)]
    return [(replace(plain, engine={"fp8": fp8}), plain) for fp8 in args.fp8 or ("blockwise", "tensorwise")]


def measure(shape: str, pair: tuple[Setup, Setup], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Let both sides take turns, and return the records; none of a dry run."""
    taken = in_turns([(case(shape, setup), setup) for setup in pair], args)
    ours, theirs = (
        {"tokens_per_s": setup.tokens_per_step / found.seconds, "peak_gib": found.peak_gib}
        for found, setup in zip(taken, pair, strict=True)
    )
    apart = taken[0].losses[0] / taken[1].losses[0] - 1
    ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
    print(
        f"{case(shape, pair[0])}: {ours['tokens_per_s']:,.0f} tokens/s, {ratio:.3f}x of bf16's {theirs['tokens_per_s']:,.0f}; "
        f"first loss {apart:+.2%}; {ours['peak_gib']:.1f} GiB, bf16 {theirs['peak_gib']:.1f}",
        flush=True,
    )
    if not math.isfinite(apart) or abs(apart) > LOSS_APART:
        raise SystemExit(f"the first losses are {apart:+.2%} apart, and {LOSS_APART:.0%} may be")
    if not pair[0].engine:
        print("  a dry run: both sides in bf16, nothing is recorded", flush=True)
        return []
    return [
        record("fp8", case(shape, pair[0]), metric, ours[metric], unit, baseline=theirs[metric])
        for metric, unit in UNITS.items()
    ]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="8b", help="whose sizes the model has (default 8b)")
    add("--fp8", choices=["blockwise", "tensorwise"], action="append", help="may be repeated (default: both)")
    add("--gpus", type=int, default=1, help="ranks, one GPU each, on this machine (default 1)")
    add("--layout", type=parse_layout, default={}, help="mesh axes, such as tp=2,sp=true,ep=2")
    add("--layers", type=int, help="depth (default: what fits so many H200s twice, with --sequential all)")
    add("--recompute", choices=["none", "full"], default="none")
    add("--tokens", type=int, help="tokens of a micro-batch on a rank (default 16384)")
    add("--microbatches", type=int, default=4, help="of a step on a rank (default 4)")
    add("--rounds", type=int, default=3, help="how often each side takes its turn (default 3)")
    add("--steps-per-turn", type=int, default=3, help="measured steps of a turn (default 3)")
    add("--sequential", action="store_true", help="start a side anew for each turn: for what fits only once")
    add("--timeout-s", type=float, default=300.0, help="longest silence of a rank (default 300)")
    add("--prove", action="store_true", help="run benchmarks/fp8_proof.py instead")
    add("--out", type=Path, default=RESULTS / "fp8_h200.json", help="records are merged into this file")
    args = parser.parse_args(argv)
    most = MODELS[SHAPES[args.shape]].shape.layers
    if args.layers is not None and not 0 < args.layers <= most:
        parser.error(f"--layers {args.layers}: the shape has {most}")
    if args.shape == "tiny" and args.fp8:
        parser.error("--shape tiny is a dry run in bf16: leave --fp8 out")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, or prove."""
    args = arguments(argv)
    if args.prove:
        tiny = ["--tiny"] if args.shape == "tiny" else []
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.fp8_proof", *tiny], cwd=ROOT, check=False
        ).returncode
    if args.shape != "tiny" and not device_name():
        print("no GPU was found; --shape tiny tries the plumbing without one", file=sys.stderr)
        return 1
    for pair in setups(args):
        if found := measure(args.shape, pair, args):
            write_records(args.out, merged(args.out, found))
            print(f"  written to {args.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
