"""Seconds of a step of a run in which vLLM and the trainer take turns on a GPU, by phase, and what a hand-over moves at which rate.

    python -m benchmarks.handover                                           recipes/vllm_one_gpu.yaml, as it is
    python -m benchmarks.handover engine.offload_params=1.0 engine.offload_grads=1.0 engine.offload_optimizer=1.0
    python -m benchmarks.handover --tiny                                    a dry run on a CPU, native generation

The command is `quintet train` of the recipe, and what is told is what it leaves in metrics.jsonl and logs/hybrid.log: medians over all
steps but the first two. `controller_share` is the part of a step that the controller takes to plan and scatter it, or that is in no
phase. Of each move `<what>_s` is told, and of training state `<what>_gb_s` besides, whose baseline is the link: a pinned copy of 1 GiB
the same way, measured after the run. A rollout that sleeps throws away and copies nothing.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import steps_of
from benchmarks.options import end_at_sigterm, positive_int
from benchmarks.records import RESULTS, ROOT, merged, record, write_records

FILE = RESULTS / "handover.json"
UNCOUNTED = 2
"""Steps at the beginning that are not counted: vLLM compiles and captures, memory is taken for the first time."""
MOVE = re.compile(r" +([\d.]+) s +([\d.]+) GB +([\d.]+) GB/s  (.+)")
LEFT, BACK = "training state left", "training state is back"
TINY = (
    *(
        "cluster.ranks=2",
        "cluster.device=cpu",
        "layout.tp=2",
        "rollout.layout.tp=1",
        "train.eval_prompts=0",
        "sft=null",
    ),
    *("train.prompts_per_step=4", "engine.offload_grads=1.0", "engine.offload_optimizer=1.0"),
)
"""Of recipes/laptop_demo.yaml: a rollout with weights of its own, and training state that leaves."""


def words_of(args: argparse.Namespace, runs: Path) -> list[str]:
    """The arguments of `quintet train`."""
    steps = UNCOUNTED + args.steps
    words = [str(args.recipe), f"run.dir={runs}", f"train.steps={steps}", "checkpoint.every_steps=0"]
    return [*words, *(TINY if args.tiny else ()), *args.overrides]


def shares_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median seconds of a step, of each phase of it, and the controller's share. steps: lines of metrics.jsonl."""
    names = sorted({key for one in steps for key in one if key.startswith("seconds/")} - {"seconds/step"})
    phases = [{name: float(one.get(name) or 0) for name in names} for one in steps]
    alone = [
        1 - (sum(of.values()) - of.get("seconds/scatter", 0)) / one["seconds/step"]
        for one, of in zip(steps, phases, strict=True)
    ]
    found = {"step_s": statistics.median(one["seconds/step"] for one in steps)}
    found |= {
        f"{name.removeprefix('seconds/')}_s": statistics.median(of[name] for of in phases) for name in names
    }
    return found | {"controller_share": statistics.median(alone)}


def moves_of(log: str) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and GB of every move in hybrid.log, by what moved."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in log.splitlines():
        if told := MOVE.fullmatch(line):
            _, gb, rate, what = told.groups()
            seconds = float(gb) / float(rate) if float(rate) else 0.0
            found.setdefault(what, []).append((seconds, float(gb)))
    return found


def link() -> dict[str, float]:
    """Return the GB/s of a pinned copy of 1 GiB from the device (`LEFT`) and to it (`BACK`), the best of five."""
    import torch

    from benchmarks.timing import timed

    here = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    found = {}
    for what, to, source in ((LEFT, host, here), (BACK, here, host)):
        copy = partial(to.copy_, source, non_blocking=True)
        found[what] = here.numel() / 1e9 / min(timed(copy, here.device)[0] for _ in range(5))
    return found


def figures(
    steps: Sequence[Mapping[str, Any]], log: str, rates: Mapping[str, float]
) -> list[tuple[str, float, str, float | None]]:
    """Return metric, value, unit and baseline of all that is told. rates: of the link."""
    found: list[tuple[str, float, str, float | None]] = [
        (name, value, "fraction" if name == "controller_share" else "s", None)
        for name, value in shares_of(steps).items()
    ]
    for what, moves in moves_of(log).items():
        counted = moves[-len(steps) :]
        name = re.sub(r"\W+", "_", what)
        found.append((f"{name}_s", statistics.median(seconds for seconds, _ in counted), "s", None))
        kind = what.partition(":")[0]
        if kind in (LEFT, BACK):
            rate = statistics.median(gb / max(seconds, 1e-6) for seconds, gb in counted)
            found.append((f"{name}_gb_s", rate, "GB/s", rates.get(kind)))
    return found


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value")
    add("--recipe", type=Path, default=ROOT / "recipes" / "vllm_one_gpu.yaml")
    add("--steps", type=positive_int, default=6, help=f"after {UNCOUNTED} (default 6)")
    add("--write", action="store_true", help="keep the records")
    add("--tiny", action="store_true", help="a dry run on a CPU")
    args = parser.parse_args(argv)
    if args.tiny:
        args.recipe = ROOT / "recipes" / "laptop_demo.yaml"
    return args


def main(argv: list[str] | None = None) -> None:
    """Run the recipe, print what it came to, and keep the records."""
    args = arguments(argv)
    end_at_sigterm()
    with tempfile.TemporaryDirectory(prefix="quintet-handover-") as directory:
        runs = Path(directory)
        command = [sys.executable, "-m", "quintet", "train", *words_of(args, runs)]
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            sys.exit(code)
        (log,) = runs.glob("*/logs/hybrid.log")
        steps, moves = steps_of(runs)[UNCOUNTED:], log.read_text(encoding="utf-8")
    rates = {} if args.tiny else link()
    records = []
    for metric, value, unit, baseline in figures(steps, moves, rates):
        beside = "" if baseline is None else f", the link {baseline:.1f}"
        print(f"  {metric:44} {value:10.4f} {unit}{beside}", flush=True)
        case = "/".join([args.recipe.stem, *args.overrides])
        records.append(record("handover", case, metric, value, unit, baseline=baseline))
    if args.write and not args.tiny:
        write_records(FILE, merged(FILE, records))


if __name__ == "__main__":
    main()
