"""The experts of one layer as grouped products, beside one product an expert: seconds forward and backward.

    python -m benchmarks.experts              128 experts of 768 units, hidden 2048 (Qwen3-30B-A3B), 16,384 tokens, top 8, one GPU
    python -m benchmarks.experts --tiny       a dry run on a CPU

The portable layers' own products (`quintet.engine.layers.experts`) in bf16, tokens dealt to experts at random. Both ways take turns, and
have to agree; values are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.options import positive_int
from benchmarks.records import RESULTS, merged, record, write_records
from benchmarks.timing import timed

AIM = 5.0
"""Times as many rows a second."""
AGREE = 0.02
"""Relative difference of gradients in bf16, by norm."""


def layer(args: argparse.Namespace, device: torch.device) -> tuple[Callable[[bool], list[torch.Tensor]], int]:
    """What computes the layer forward and backward, grouped or not, and returns its output and gradients; and the rows."""
    from quintet.engine.layers.experts import _Groups, group_rows, grouped_linear
    from quintet.engine.layers.mlp import gated

    generator = torch.Generator(device).manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        made = torch.randn(*sizes, device=device, generator=generator) * sizes[-1] ** -0.5
        return made.to(torch.bfloat16).requires_grad_()

    first = drawn(args.experts, 2 * args.width, args.hidden)
    second = drawn(args.experts, args.hidden, args.width)
    rows = args.tokens * args.top_k
    chosen = torch.randint(0, args.experts, (rows,), generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(chosen, minlength=args.experts)
    x = torch.randn(rows, args.hidden, device=device, generator=generator).to(torch.bfloat16).requires_grad_()
    groups = {True: group_rows(counts, device, first, second), False: _Groups(counts.tolist(), None)}
    if groups[True].ends is None:
        raise SystemExit("grouped products are not to be had for these sizes on this device")

    def compute(grouped: bool) -> list[torch.Tensor]:
        of = groups[grouped]
        out = grouped_linear(gated(grouped_linear(x, first, of)), second, of)
        return [out, *torch.autograd.grad(out.float().square().mean(), (x, first, second))]

    return compute, rows


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"experts": 128, "hidden": 2048, "width": 768, "tokens": 16384, "top_k": 8}
    for name, value in sizes.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=positive_int, default=value, help=f"default {value}"
        )
    parser.add_argument("--repeats", type=positive_int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU; nothing is recorded")
    parser.add_argument("--out", type=Path, default=RESULTS / "experts.json")
    args = parser.parse_args(argv)
    if args.tiny:
        args.experts, args.hidden, args.width, args.tokens, args.top_k, args.repeats = 8, 32, 16, 64, 2, 2
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure both ways in turns."""
    args = arguments(argv)
    if not (args.tiny or torch.cuda.is_available()):
        print("no GPU was found; --tiny tries the plumbing without one", file=sys.stderr)
        return 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute, rows = layer(args, device)
    apart = max(
        float((a - b).detach().float().norm() / b.detach().float().norm())
        for a, b in zip(compute(True), compute(False), strict=True)
    )
    if not apart <= AGREE:
        raise SystemExit(f"the two ways differ by {apart:.1%}, and {AGREE:.0%} may be")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(args.repeats):
        for grouped, found in seconds.items():
            found.append(timed(partial(compute, grouped), device)[0])
    ours, theirs = (rows / statistics.median(one) for one in seconds.values())
    case = f"{args.experts}x{args.width}-hidden{args.hidden}-tokens{args.tokens}-top{args.top_k}/portable"
    reached = "" if args.tiny else f" (aim: {AIM:g}, {'reached' if ours / theirs >= AIM else 'missed'})"
    print(
        f"{case}: {ours:,.0f} rows/s grouped, {ours / theirs:.2f}x of one by one{reached}; {apart:.1e} apart",
        flush=True,
    )
    if not args.tiny:
        made = [record("experts", case, "rows_per_s", ours, "rows/s", baseline=theirs)]
        write_records(args.out, merged(args.out, made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
