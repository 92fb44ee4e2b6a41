"""Twenty steps of a whole run with vLLM, killed and resumed: does it end, and with a better model?

    python -m benchmarks.gpu_steps --gpus 1                vLLM and the trainer take turns on each GPU
    python -m benchmarks.gpu_steps --gpus 4 --steps 40
    python -m benchmarks.gpu_steps --tiny                  native generation on a CPU: the plumbing

`recipes/laptop_demo.yaml` with heads that vLLM's kernels take. The run is killed with all its processes in the middle of a step,
after its first save, and resumed by the same command. Exit status 1 if a step is missing, a figure is not finite, or the model answers
no better than before training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.options import end_at_sigterm, positive_int
from benchmarks.records import ROOT

SAVED_EVERY = 5
EVALUATED = 256 * 8
"""Answers of an evaluation, as the recipe says."""
SURE = 4.0
"""Standard errors that accuracy has to rise by."""
LIMIT_S = 500.0


def command(args: argparse.Namespace, runs: Path) -> list[str]:
    """The run, taken up where there is something to take up."""
    words = [
        *("train", "recipes/laptop_demo.yaml", f"run.dir={runs}", f"train.steps={args.steps}", "resume=auto"),
        *(f"checkpoint.every_steps={SAVED_EVERY}", f"cluster.ranks={args.gpus}"),
    ]
    if not args.tiny:
        words += ["cluster.device=cuda", "model.build.head_dim=64", "rollout.backend=vllm"]
        words += ["rollout.memory_fraction=0.2"]
    return [sys.executable, "-m", "quintet", *words, *args.overrides]


def killed_after(words: list[str], runs: Path, steps: int, limit_s: float) -> None:
    """Start the run and kill it and all it started once so many steps are told."""
    process = subprocess.Popen(words, cwd=ROOT)
    until = time.monotonic() + limit_s
    try:
        while len(steps_of(runs)) < steps:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(
                    f"the run told {len(steps_of(runs))} steps and not {steps} ({process.returncode=})"
                )
            time.sleep(0.05)
    finally:
        killed(process)


def killed(process: subprocess.Popen[bytes]) -> None:
    """Kill it and all that it started, some of which have sessions of their own."""
    import psutil

    family = [process.pid]
    if process.poll() is None:
        family += [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def steps_of(runs: Path) -> list[dict[str, Any]]:
    """The lines of metrics of training steps of the run's last part, reinforcement learning."""
    found = []
    for file in runs.glob("*/metrics.jsonl"):
        whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines()]
        found += [one for one in lines if one["stage"] == "rl" and "loss" in one]
    return found


def judged(args: argparse.Namespace, runs: Path) -> list[str]:
    """What is wrong with what the resumed run left; prints what it came to."""
    steps = steps_of(runs)
    wrong = []
    if [one["step"] for one in steps] != list(range(1, args.steps + 1)):
        wrong.append(f"the steps told are {[one['step'] for one in steps]}, not 1 to {args.steps}")
    wrong += [
        f"step {one['step']}: {key} is {value}"
        for one in steps
        for key, value in one.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    (file,) = runs.glob("*/summary.json")
    summary = json.loads(file.read_text(encoding="utf-8"))
    before, after = summary["eval_before"], summary["eval_after"]
    error = math.sqrt((before * (1 - before) + after * (1 - after)) / EVALUATED)
    told = f"accuracy {before:.1%} before and {after:.1%} after {len(steps)} steps"
    print(f"{told}, {(after - before) / error:.1f} standard errors apart", flush=True)
    if after - before < SURE * error:
        wrong.append(f"{told}: it was to rise by {SURE * error:.1%} at least")
    return wrong


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_steps", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--gpus", type=positive_int, default=1)
    parser.add_argument("--steps", type=positive_int, default=20)
    parser.add_argument("--tiny", action="store_true", help="native generation, on a CPU")
    parser.add_argument("overrides", nargs="*", help="key=value for the recipe")
    args = parser.parse_args(argv)
    if args.steps <= SAVED_EVERY + 1:
        parser.error(f"--steps {args.steps}: more than {SAVED_EVERY + 1}, after which the run is killed")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run, kill, resume and judge."""
    args = arguments(argv)
    end_at_sigterm()
    with tempfile.TemporaryDirectory(prefix="quintet-gpu-steps-") as directory:
        runs = Path(directory)
        words = command(args, runs)
        print("+", *words, flush=True)
        killed_after(words, runs, SAVED_EVERY + 2, LIMIT_S)
        print(f"killed after {len(steps_of(runs))} steps; it goes on", flush=True)
        subprocess.run(words, cwd=ROOT, check=True, timeout=LIMIT_S)
        wrong = judged(args, runs)
    print(*(f"FAILED {line}" for line in wrong), sep="\n", end="", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
