"""Tokens a second of vLLM behind quintet's adapter with drafts by the model's own layer, by draft length, sequences and context.

    python -m benchmarks.mtp                        a MiMo of 445M parameters on one GPU, trained there first
    python -m benchmarks.mtp --shape laptop         a small one on a CPU, where vLLM for CPU is installed
    python -m benchmarks.mtp --shape tiny --rounds 1    a dry run
    python -m benchmarks.mtp --table quintet/rollout/draft_speed.json    and what rollout.draft_tokens=auto reads
    python -m benchmarks.mtp --sequences 8 64 256 --contexts 4096 16384    other places than the shape's

The model is trained from scratch on a language in which three of four greedy drafts are accepted (`benchmarks.mtp_train`, which also
tells what training the layer costs). Temperature 1, log-probs told, no end of sequence. Each draft length has an engine of its own;
starting, and the first call of `generate`, are not counted. Prompts are as long as makes the mean context that of the case, and up to
eight samples share one. What is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.mtp_work import SHAPES, Shape
from benchmarks.options import positive_int
from benchmarks.records import RESULTS, ROOT, merged, record, write_records

METRIC, UNIT = "rollout_tokens_per_s", "tokens/s"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mtp", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--shape", choices=SHAPES, default="400m")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[0, 1, 2, 3],
        help="of drafts; 0, without any, is among them",
    )
    for name, what in (("sequences", "decoded at once"), ("contexts", "tokens of a sequence, in the mean")):
        parser.add_argument(
            f"--{name}", type=positive_int, nargs="+", help=f"{what}: the cases, in place of the shape's"
        )
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--memory-fraction", type=float, default=0.8)
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of one draft length")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON records go here, instead of being merged into benchmarks/results/mtp.json",
    )
    parser.add_argument(
        "--table",
        type=Path,
        help="rows of quintet/rollout/draft_speed.json go here, in place of this device's at the same places",
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="where the model is, and what is told of each draft length: what is not there is made, and kept",
    )
    parser.add_argument("--train-only", action="store_true", help="generate nothing")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if 0 not in args.lengths or min(args.lengths) < 0 or len({*args.lengths}) < len(args.lengths):
        parser.error("--lengths: name 0, which the others are compared with, and each length once")
    return args


def shape_of(args: argparse.Namespace) -> Shape:
    """Return the shape that is measured, at the places that are asked for."""
    return SHAPES[args.shape].at(args.sequences, args.contexts)


def refuse_short(model: Path, shape: Shape) -> None:
    """Refuse a model that was kept and has fewer positions than the longest sequence."""
    needed: int = shape.build()["max_position_embeddings"]
    positions: int = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    if positions < needed:
        raise SystemExit(
            f"{model} has {positions} positions, and these contexts need {needed}: name another --model, which is trained for them"
        )


def cases(shape: Shape) -> list[tuple[int, int]]:
    """Sequences and context of each case."""
    return [(n, context) for context in shape.contexts for n in shape.sequences]


SAMPLES = 8
"""Of a prompt, at most."""


def one_round(rollout: Any, shape: Shape, case: tuple[int, int], turn: int) -> tuple[float, float, float]:
    """Seconds of a call; the mean number of accepted tokens of a draft, and how many of the first ones were (0 without drafts)."""
    from quintet.rollout.base import Request, Sampling

    count, context = case
    samples = min(count, SAMPLES)
    seeds = [turn * 1000 + at for at in range(count // samples)]
    prompts = [shape.language.text(context - shape.response // 2, seed) for seed in seeds]
    requests = [Request(p, samples=samples, seed=seed) for p, seed in zip(prompts, seeds, strict=True)]
    rollout.metrics()
    start = time.perf_counter()
    rows = rollout.generate(requests, Sampling(max_response_tokens=shape.response, ignore_end=True))
    seconds = time.perf_counter() - start
    if any(
        len(s.response_ids) != shape.response or len(s.policy_logprobs) != shape.response
        for row in rows
        for s in row
    ):
        raise SystemExit(
            "a response is not of the length that was asked, or came without a log-prob for each token"
        )
    counts = rollout.metrics()
    drafts = max(counts["drafts"], 1)
    return seconds, counts["accepted_tokens"] / drafts, counts.get("accepted_at_1", 0.0) / drafts


def work(args: argparse.Namespace) -> None:
    """Be the process of one draft length: prints the device, and seconds and accepted tokens of each round by case."""
    import torch

    from quintet.recipe import schema
    from quintet.rollout.vllm import compat
    from quintet.rollout.vllm.rollout import VllmRollout

    shape, device = shape_of(args), "cuda" if torch.cuda.is_available() else "cpu"
    recipe = schema.Recipe.model_validate(
        {
            "model": {"dtype": "bf16" if device == "cuda" else "fp32"},
            "data": {"max_prompt_tokens": max(shape.contexts)},
            "mtp": {"train": False},
            "rollout": {
                "backend": "vllm",
                "draft_tokens": args.worker,
                "max_response_tokens": shape.response,
                "memory_fraction": args.memory_fraction,
                "sequences_per_rank": max(shape.sequences),
            },
        }
    )
    rollout = VllmRollout(recipe, args.model, device=device, decode=str)
    found = [
        [one_round(rollout, shape, case, turn) for turn in range(args.rounds + 1)][1:]
        for case in cases(shape)
    ]
    rollout.close()
    print("\n" + json.dumps({"device": compat.device_name(device), "rounds": found}), flush=True)


def run(args: argparse.Namespace, model: Path, length: int) -> dict[str, Any]:
    """What `work` tells of one draft length; or has told before, of a model that was kept."""
    places = {name: tuple(getattr(args, name) or ()) for name in ("sequences", "contexts")}
    asked = "".join(f"-{name}{'-'.join(map(str, at))}" for name, at in places.items() if at)
    told = model.with_name(f"{model.name}-drafts{length}{asked}.json")
    if not told.exists():
        options = {
            "shape": args.shape,
            "rounds": args.rounds,
            "memory-fraction": args.memory_fraction,
            "worker": length,
            "model": model,
        }
        answer = answer_of(
            args,
            ["benchmarks.mtp", *(f"--{name}={value}" for name, value in options.items()), *_words(places)],
            f"drafts of {length}",
        )
        told.write_text(json.dumps(answer))
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def _words(places: dict[str, tuple[int, ...]]) -> list[str]:
    """Places on a command line."""
    return [word for name, at in places.items() if at for word in (f"--{name}", *map(str, at))]


def answer_of(args: argparse.Namespace, command: list[str], what: str) -> dict[str, Any]:
    """The last line, as JSON, that a module says. SystemExit with the end of its output when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=args.timeout_s,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stdout[-6000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def trained(args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """Train the model; the records of that, printed."""
    command = ["benchmarks.mtp_train", "--shape", args.shape, "--model", str(model)]
    told = answer_of(args, command + _words({"contexts": tuple(args.contexts or ())}), "training")
    overhead = told["without"] / told["with"] - 1
    print(
        f"trained to a loss of {told['loss']:.3f}, {told['loss_ahead']:.3f} ahead (the language's entropy is {told['entropy']:.3f}): "
        f"{told['with']:,.0f} tokens/s, {told['without']:,.0f} without the layer; {overhead:.1%} of time for {told['flop_share']:.1%} of FLOPs",
        flush=True,
    )
    name = f"{args.shape}/train"
    return [
        record("mtp", name, "tokens_per_s", told["with"], "tokens/s", baseline=told["without"]),
        record("mtp", f"{name}/overhead", "time_over_flops", overhead / told["flop_share"], "ratio"),
        record("mtp", name, "accuracy", told["accuracy_ahead"], "fraction"),
    ]


def measured(
    args: argparse.Namespace, told: dict[int, dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records, and rows of the table, of what each draft length's process told; prints them."""
    from quintet.rollout.draft_length import ASSUMED_ACCEPTANCE, Measured, choose

    shape, records, rows, speeds = shape_of(args), [], [], {}
    device = told[0]["device"]
    for at, (count, context) in enumerate(cases(shape)):
        for length, one in sorted(told.items()):
            tokens = count * shape.response
            speed = tokens / statistics.median(seconds for seconds, *_ in one["rounds"][at])
            accepted, first = (statistics.fmean(r[place] for r in one["rounds"][at]) for place in (1, 2))
            speeds[count, context, length] = speed
            base = speeds[count, context, 0]
            name = f"{args.shape}/vllm/seqs{count}/context{context}/k{length}"
            records.append(record("mtp", name, METRIC, speed, UNIT, baseline=base if length else None))
            print(
                f"{name}: {speed:,.0f} {UNIT}, {speed / base:.2f} of none, {accepted:.2f} tokens of a draft accepted, "
                f"{first:.0%} of the first ones",
                flush=True,
            )
            if length:
                records.append(record("mtp", name, "accepted_length", 1 + accepted, "tokens"))
                records.append(record("mtp", name, "acceptance", first, "fraction"))
                rows.append(
                    {
                        "device": device,
                        "sequences": count,
                        "context_tokens": context,
                        "draft_tokens": length,
                        "accepted": round(accepted, 3),
                        "speedup": round(speed / base, 3),
                    }
                )
    table = [Measured(**row) for row in rows]
    for count, context in cases(shape):
        chosen = choose(table, device, count, context, args.lengths, ASSUMED_ACCEPTANCE)
        print(
            f"auto, {chosen.why}: {speeds[count, context, chosen.draft_tokens] / speeds[count, context, 0]:.2f} of none",
            flush=True,
        )
        name = f"{args.shape}/vllm/seqs{count}/context{context}/auto"
        value = speeds[count, context, chosen.draft_tokens]
        records.append(record("mtp", name, METRIC, value, UNIT, baseline=speeds[count, context, 0]))
    return records, rows


def with_rows(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table with new ones in place of those of the same device, place and draft length."""
    key = ("device", "sequences", "context_tokens", "draft_tokens")
    new = {tuple(row[name] for name in key) for row in rows}
    return [row for row in before if tuple(row[name] for name in key) not in new] + rows


def main(argv: list[str] | None = None) -> None:
    """Measure all draft lengths, one after another."""
    args = arguments(argv)
    if args.worker is not None:
        work(args)
        return
    import torch  # noqa: F401  (records name its device)

    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="quintet-mtp-") as directory:
        model = args.model or Path(directory) / "model"
        if not model.exists():
            records += trained(args, model)
        refuse_short(model, shape_of(args))
        told = {}
        for length in [] if args.train_only else sorted(args.lengths):
            print(f"drafts of {length}", flush=True)
            told[length] = run(args, model, length)
    rows: list[dict[str, Any]] = []
    if told:
        generated, rows = measured(args, told)
        records += generated
    if args.table is not None and rows:
        before = json.loads(args.table.read_text(encoding="utf-8")) if args.table.exists() else []
        lines = ",\n".join(f"  {json.dumps(row)}" for row in with_rows(before, rows))
        args.table.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    path = args.out or RESULTS / "mtp.json"
    if args.shape != "tiny" or args.out:
        write_records(path, records if args.out else merged(path, records))
        print(f"written to {path}", flush=True)


if __name__ == "__main__":
    main()
