"""Seconds per GRPO step on a laptop, and how they split, beside TRL's GRPOTrainer on the same work in the same run.

    make bench-laptop                          both cases; writes benchmarks/results/laptop_grpo.json
    make bench-laptop ARGS="--case short --only trl"

Same model, prompts, samples per prompt, response lengths, algorithm and cores (benchmarks/laptop_cases.py). The two sides take
turns, each in processes of its own, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.laptop_cases import ALPHABET, CASES, MODEL, Case
from benchmarks.options import positive_int
from benchmarks.records import RESULTS, ROOT, merged, record, versions, write_records

FILE = RESULTS / "laptop_grpo.json"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
# glibc otherwise hands freed memory back to the kernel each step and faults it in anew: a fifth to a half of TRL's speed.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_MAX_": "0"}
TRL_SETTINGS = {"short": ["--micro-batches", "1"], "long_tail": ["--micro-batches", "8"]}
"""The fastest of what was tried; benchmarks/README.md has the table."""

Result = dict[str, Any]
"""`step_s`: seconds of each measured step; `generate_s_median`, `train_s_median`; `samples_per_s`; `versions`; `settings`."""


def make_model(folder: Path) -> None:
    """Write the random-weight model and its character tokenizer as a Hugging Face directory."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from quintet.data.tokenizer import build_char_tokenizer

    tokenizer = build_char_tokenizer(ALPHABET, folder)
    torch.manual_seed(0)
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **special, **MODEL)).save_pretrained(folder)


def run_quintet(case: Case, model: Path, cores: int) -> Result:
    """One run of the case in quintet, in processes of its own."""
    from benchmarks import laptop_quintet

    return laptop_quintet.run_quintet(case, model, cores)


def run_trl(case: Case, model: Path, cores: int) -> Result:
    """One run of the case in TRL, in its own environment and process."""
    if not TRL_PYTHON.exists():
        raise SystemExit(f"{TRL_PYTHON} is missing: `make bench-laptop` makes it.")
    work = model.parent / f"{case.name}.json"
    work.write_text(json.dumps(case.work()))
    script = ROOT / "benchmarks" / "trl_baseline.py"
    command = [
        str(TRL_PYTHON),
        str(script),
        "--model",
        str(model),
        "--work",
        str(work),
        "--threads",
        str(cores),
    ]
    command += TRL_SETTINGS[case.name]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment = {**os.environ, **KEEP_FREED_MEMORY, **offline, "OMP_NUM_THREADS": str(cores)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"TRL failed on case {case.name}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def pooled(results: list[Result], case: Case) -> Result:
    """Several runs of one case as one: the median over all their steps."""
    steps = [second for result in results for second in result["step_s"]]
    samples = len(case.lengths()[0])
    medians = {
        key: statistics.median(r[key] for r in results) for key in ("generate_s_median", "train_s_median")
    }
    return {**results[-1], **medians, "step_s": steps, "samples_per_s": samples / statistics.median(steps)}


def line(side: str, result: Result) -> str:
    steps = result["step_s"]
    return (
        f"  {side:8} {statistics.median(steps):7.3f} s/step (min {min(steps):.3f}, max {max(steps):.3f}), "
        f"generate {result['generate_s_median']:.3f}, train {result['train_s_median']:.3f}, "
        f"{result['samples_per_s']:8.1f} samples/s"
    )


def records(case: Case, ours: Result, theirs: Result) -> list[dict[str, Any]]:
    """Samples per second and the split of a step, TRL's beside ours."""
    named = versions() | {f"trl side: {name}": version for name, version in theirs["versions"].items()}
    units = {"samples_per_s": "samples/s", "generate_s_median": "s", "train_s_median": "s"}
    return [
        record("laptop_grpo", f"{case.name}/trl", metric, ours[metric], unit, baseline=theirs[metric])
        | {"versions": named, "command": "make bench-laptop"}
        for metric, unit in units.items()
    ]


def measure(case: Case, model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run both sides of one case in turns, print them, and return the records (none with one side alone)."""
    lengths = [length for step in case.lengths()[case.warmup_steps :] for length in step]
    print(
        f"{case.name}: {len(case.lengths()[0])} samples a step, {statistics.mean(lengths):.1f} response tokens each"
    )
    sides = {
        "trl": lambda: run_trl(case, model, args.cores),
        "quintet": lambda: run_quintet(case, model, args.cores),
    }
    wanted = [side for side in sides if args.only in (None, side)]
    runs: dict[str, list[Result]] = {side: [] for side in wanted}
    for _ in range(args.rounds):
        for side in wanted:
            runs[side].append(sides[side]())
            print(line(side, runs[side][-1]), flush=True)
    if args.only:
        return []
    ours, theirs = pooled(runs["quintet"], case), pooled(runs["trl"], case)
    print(f"  quintet / trl: {ours['samples_per_s'] / theirs['samples_per_s']:.2f}x samples/s", flush=True)
    return records(case, ours, theirs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", choices=list(CASES), action="append", help="one case; may be repeated (default: all)"
    )
    parser.add_argument("--only", choices=["quintet", "trl"], help="one side alone; writes no records")
    parser.add_argument(
        "--rounds", type=positive_int, default=2, help="how often the two sides take turns (default 2)"
    )
    parser.add_argument(
        "--cores", type=positive_int, default=os.cpu_count(), help="cores for either side (default: all)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        for name in args.case or CASES:
            if found := measure(CASES[name], model, args):
                write_records(FILE, merged(FILE, found))
                print(f"  written to {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
