"""Which kernels for experts make a training step on TransformerEngine's layers faster: quintet with each, beside quintet without.

    python -m benchmarks.expert_kernels                       Qwen3-30B-A3B's experts, 4 of 48 layers, one GPU
    python -m benchmarks.expert_kernels --write               and put what was measured where runs choose by it
    python -m benchmarks.expert_kernels --ep 4 --write        of the 32 experts that a rank of layout.ep=4 holds
    python -m benchmarks.expert_kernels --shape tiny-moe      a dry run on a CPU: portable layers on both sides, nothing is recorded

Both sides live at the same time and take turns, each of which counts by its median step. A kernel's speedup is the ratio of the turn with the
median ratio (of two in the middle the lower one), whose rates are the record's value and baseline; its `least` is that of the worst turn. Runs take a kernel that was faster in every turn and by half a percent in the median
(`quintet/plan/kernels.py`), unless the recipe says otherwise. The first losses have to agree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engine_work import MODELS, TINY, Setup, setup_of
from benchmarks.options import positive_int
from benchmarks.pairs import Taken, in_turns
from benchmarks.records import RESULTS, device_name, merged, middle, record, write_records
from benchmarks.room import card_bytes, depth_of
from quintet.plan.kernels import TABLE, MeasuredKernel, experts_of, write_kernel
from quintet.recipe.megatron import EXPERT_KERNELS, TORCH_EXPERTS

FITTING = {"qwen3-30b-a3b": 4}
"""Layers of a shape that one H200 trains while the other side's weights, gradients and optimizer state wait beside them."""
LOSS_APART = 2e-3


def setups(args: argparse.Namespace, kernel: str, card: int | None = None) -> list[tuple[str, Setup]]:
    """Both sides with their names: with the kernel, and without. Of a dry run neither has it. card: bytes of the GPU, None where they are not
    known. SystemExit for a depth that it does not hold, and for an ep that does not divide the experts."""
    dry = args.shape in TINY
    experts, left = divmod(MODELS[args.shape].shape.moe.experts, args.ep)  # type: ignore[union-attr]
    if left:
        raise SystemExit(
            f"--ep {args.ep} does not divide the {experts * args.ep + left} experts of {args.shape}"
        )
    backend = "portable" if dry else "transformer_engine"
    plain = setup_of(
        args.shape, backend=backend, tokens=args.tokens, experts=experts if args.ep > 1 else None
    )
    if dry:
        plain = replace(plain, layers=args.layers)
        return [(kernel, plain), ("without", plain)]
    whole = MODELS[args.shape].shape.layers
    most = whole if args.sequential else FITTING.get(args.shape, whole)
    plain = replace(plain, layers=depth_of([plain] * 2, args.layers, most, card, args.sequential))
    # The other kernels are on both sides those that a run takes.
    ways: Sequence[dict[str, Any]] = [{"megatron": {kernel: taken}} for taken in (True, False)]
    if kernel == TORCH_EXPERTS:
        ways = [{"experts": "torch"}, {"experts": "transformer_engine"}]
    return [(name, replace(plain, engine=way)) for name, way in zip((kernel, "without"), ways, strict=True)]


def row_of(setup: Setup, kernel: str, least: float, made: dict[str, Any]) -> MeasuredKernel:
    """What runs choose by. least: the speedup of the worst turn. made: the record of the same run, whose ratio is the speedup."""
    return MeasuredKernel(
        device=device_name(),
        kernel=kernel,
        experts=experts_of(setup.shape),
        speedup=round(made["value"] / made["baseline"], 4),
        least=round(least, 4),
        command=made["command"],
        commit=made["commit"],
        date=made["date"],
    )


def measure(args: argparse.Namespace, kernel: str) -> tuple[dict[str, Any], MeasuredKernel]:
    """Let both sides take turns, print what came out, and return the record and what runs choose by. SystemExit for losses that differ."""
    pair = setups(args, kernel, card_bytes())
    taken = in_turns(pair, args)
    ours, theirs = taken
    apart = abs(ours.losses[0] / theirs.losses[0] - 1)
    if not apart <= LOSS_APART:
        raise SystemExit(f"{kernel}: the first losses are {apart:.2%} apart, and {LOSS_APART:.1%} may be")
    setup = pair[1][1]
    turns = rates_of(setup, ours, theirs)
    rates = middle(turns)
    case = f"{replace(setup, engine={}).case()}/{kernel}".lower()
    made = record("expert_kernels", case, "tokens_per_s", rates[0], "tokens/s", baseline=rates[1])
    row = row_of(setup, kernel, min(fast / slow for fast, slow in turns), made)
    print(
        f"{case}: {rates[0]:,.0f} tokens/s, without it {rates[1]:,.0f}; {row.speedup:.3f} times as fast, in the worst turn "
        f"{row.least:.3f}: {'taken' if row.taken else 'not taken'}",
        flush=True,
    )
    return made, row


def rates_of(setup: Setup, ours: Taken, theirs: Taken) -> list[tuple[float, float]]:
    """Tokens a second with the kernel and without it, of the median step of each turn."""
    with_it, without = (
        [setup.tokens_per_step / statistics.median(turn) for turn in side.turns] for side in (ours, theirs)
    )
    return list(zip(with_it, without, strict=True))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shapes = [name for name, model in MODELS.items() if model.shape.moe is not None]
    add("--shape", choices=shapes, default="qwen3-30b-a3b", help="whose experts the model has")
    add("--kernel", choices=EXPERT_KERNELS, action="append", help="may be repeated (default: all)")
    add("--ep", type=positive_int, default=1, help="measure the experts that one of so many ranks holds")
    add("--layers", type=positive_int, help="depth (default: what the card holds twice)")
    add("--tokens", type=positive_int, help="tokens of a micro-batch (default 16384)")
    add("--rounds", type=positive_int, default=5, help="how often each side takes its turn (default 5)")
    add("--steps-per-turn", type=positive_int, default=3, help="measured steps of a turn (default 3)")
    add("--sequential", action="store_true", help="start a side anew for each turn: for what fits only once")
    add("--timeout-s", type=float, default=300.0, help="longest silence of a rank (default 300)")
    add("--write", action="store_true", help="put what was measured where runs choose by it")
    add(
        "--out",
        type=Path,
        default=RESULTS / "expert_kernels.json",
        help="records are merged into this file",
    )
    add("--table", type=Path, default=TABLE, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure each kernel."""
    args = arguments(argv)
    dry = args.shape in TINY
    if not dry and not device_name():
        print("no GPU was found; --shape tiny-moe tries the plumbing without one", file=sys.stderr)
        return 1
    for kernel in args.kernel or EXPERT_KERNELS:
        made, row = measure(args, kernel)
        if dry:
            continue
        write_records(args.out, merged(args.out, [made]))
        if args.write:
            write_kernel(row, args.table)
    if dry:
        print("  a dry run: both sides without, nothing is recorded", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
