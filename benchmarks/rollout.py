"""Tokens a second of the rollout back ends, native and vLLM, through quintet's own adapters, on the same prompts.

    python -m benchmarks.rollout --gpus 1                  Qwen2.5-1.5B's shape on one GPU
    python -m benchmarks.rollout --gpus 2 --only native    one side alone, over two GPUs (tensor parallel)
    python -m benchmarks.rollout --gpus 1 --only vllm bare bare-first    vLLM behind quintet, and alone
    python -m benchmarks.rollout --gpus 1 --only bare bare-silent           what log-probs cost vLLM alone
    python -m benchmarks.rollout --only vllm vllm-silent --call-by-call      what log-probs cost quintet
    python -m benchmarks.rollout --shape laptop --turns 5  a small model on a CPU, where vLLM for CPU is installed
    python -m benchmarks.rollout --tiny                    a dry run, on a CPU too

Random weights, the same for both sides; 128 prompts of 256 random tokens, 4 samples of each; temperature 1, nothing cut,
log-probs told. End-of-sequence is ignored, so that every response has the length that was drawn for it beforehand: 512
tokens, or in the case long-tail log-normal from 32 to 2048 (median 256). Each side runs in processes of its own, one side
after the other, or with --call-by-call both at once, in turns; starting, and the first call of `generate`, are not counted. The
value is the response tokens of a call by the median of its seconds; `logprob_cost` is the part of the rate of vllm-silent that vllm
lacks. What is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.options import end_at_sigterm, need_gpus, positive_int, user_errors_told
from benchmarks.records import RESULTS, ROOT, merged, record, write_records
from benchmarks.rollout_work import CONFIGS, Case, cases_of
from benchmarks.sides import Side, answer_stream

SIDES = ("native", "vllm", "vllm-routes", "vllm-silent", "bare", "bare-first", "bare-silent")
"""quintet's back ends, vLLM also with routes returned and without log-probs; and vLLM alone: at its best, with its first model runner, and
at its best without log-probs."""
BASELINES = {"vllm": "bare", "vllm-silent": "vllm", "native": "vllm", "bare": "bare-silent"}
"""By side, whose value its record is compared with, if that was measured in the same run."""
LOGPROB_COST = 0.03
"""Of the rate without log-probs, what these are to take at most."""
MEMORY_FRACTION, OF_TWO = 0.5, 0.4
"""Of the GPU, for vLLM: where it is alone there, and where it is beside another side."""
CONFIG_ALONE = "qwen3-30b-a3b"
"""The shape of which no weights are written to a disk: vLLM makes up its own."""
ON_CPU = "laptop"
"""The shape that is measured on a CPU, whatever else there is."""


def say(text: str) -> None:
    """Tell how far it is; of the ranks of a side, the first does."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def measure(rollout: Any, case: Case, vocab_size: int, rounds: int, side: str) -> list[tuple[float, float]]:
    """What `one_round` tells of each round, after one that is not counted."""
    seconds = []
    for turn in range(rounds + 1):
        seconds.append(one_round(rollout, case, vocab_size, turn, side))
        counted = f"round {turn} of {rounds}" if turn else "not counted"
        say(f"  {case.name or 'one length'}: {seconds[-1][0]:.2f} s ({counted})")
    return seconds[1:]


def one_round(rollout: Any, case: Case, vocab_size: int, turn: int, side: str) -> tuple[float, float]:
    """Seconds, and seconds of this process on its CPUs, of a call of `generate`. SystemExit for a response of another length
    than was asked, or without log-probs or routes where the side has some. turn: draws other prompts and seeds."""
    from quintet.rollout.base import Request, Sampling

    sampling = Sampling(max_response_tokens=case.longest, ignore_end=True)
    asked = case.response_tokens()
    requests = [
        # Another seed each time; other tokens too, so that no prompt is found in a cache.
        Request(
            [(i + turn) % vocab_size for i in ids],
            len(lengths),
            seed=turn * 1000 + at,
            max_response_tokens=lengths,
        )
        for at, (ids, lengths) in enumerate(zip(case.prompt_ids(vocab_size), asked, strict=True))
    ]
    start, busy = time.perf_counter(), time.process_time()
    samples = rollout.generate(requests, sampling)
    seconds = time.perf_counter() - start, time.process_time() - busy
    made = [tuple(len(s.response_ids) for s in row) for row in samples]
    if made != asked:
        raise SystemExit("a response has another length than was asked")
    told = 0 if side.endswith("-silent") else 1  # of each token
    if any(len(s.policy_logprobs) != told * len(s.response_ids) for row in samples for s in row):
        raise SystemExit("a response came without a log-prob for each token")
    if side == "vllm-routes" and any(s.routes is None for row in samples for s in row):
        raise SystemExit("a response came without routes")
    return seconds


def native(args: argparse.Namespace, model: Path, cases: tuple[Case, ...]) -> tuple[Any, Callable[[], None]]:
    """The native back end of one rank, as `torchrun` would start it, and what ends it."""
    import torch
    import torch.distributed as dist

    from quintet.engine.engine import Engine
    from quintet.models import read_shape
    from quintet.recipe import schema
    from quintet.rollout.native.rollout import NativeRollout

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    settings = schema.Engine(tokens_per_microbatch_per_rank=16384)
    layout = schema.Layout(tp=args.gpus)
    engine = Engine(
        read_shape(model), layout, engine=settings, optimizer=None, dtype="bf16" if on_gpu else "fp32"
    )
    engine.load_hf(model)
    slots = max(case.prompts * case.samples_per_prompt for case in cases)
    rollout = NativeRollout(engine.model, engine.mesh, slots=slots, decode=str, update=lambda: None)
    return rollout, dist.destroy_process_group


def vllm(args: argparse.Namespace, model: Path, cases: tuple[Case, ...]) -> tuple[Any, Callable[[], None]]:
    """vLLM behind quintet's adapter, and what ends it."""
    import torch

    from quintet.recipe import schema
    from quintet.rollout.vllm.rollout import VllmRollout

    on_gpu = torch.cuda.is_available()
    recipe = schema.Recipe.model_validate(
        {
            "model": {"dtype": "bf16" if on_gpu else "fp32"},
            "data": {"max_prompt_tokens": max(case.prompt_tokens for case in cases)},
            "rollout": {
                "backend": "vllm",
                "max_response_tokens": max(case.longest for case in cases),
                "memory_fraction": args.memory_fraction,
                "sequences_per_rank": max(case.prompts * case.samples_per_prompt for case in cases),
                "layout": {"tp": args.gpus},
                "return_routes": args.worker == "vllm-routes",
                "vllm": {"load_format": "dummy"} if args.shape == CONFIG_ALONE else {},
            },
        }
    )
    made = VllmRollout
    if args.worker == "vllm-silent":
        from benchmarks.rollout_silent import SilentVllm as made
    rollout = made(recipe, model, device="cuda" if on_gpu else "cpu", decode=str)
    return rollout, rollout.close


def bare(args: argparse.Namespace, model: Path, cases: tuple[Case, ...]) -> tuple[Any, Callable[[], None]]:
    """vLLM without quintet, and what ends it."""
    import torch

    from benchmarks.rollout_bare import BareVllm

    rollout = BareVllm(
        model,
        longest=max(case.prompt_tokens + case.longest + 1 for case in cases),
        sequences=max(case.prompts * case.samples_per_prompt for case in cases),
        gpus=args.gpus,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        memory_fraction=args.memory_fraction,
        second_runner=args.worker != "bare-first",
        logprobs=args.worker != "bare-silent",
    )
    return rollout, rollout.close


def write_model(path: Path, config: dict[str, Any], dtype: str, *, weights: bool = True) -> None:
    """Random weights of a config's shape, as a Hugging Face directory; without weights its config alone."""
    import torch
    import transformers

    torch.manual_seed(0)
    architecture = config["architectures"][0]
    made = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**config)
    if not weights:
        made.architectures = [architecture]
        made.save_pretrained(path)
        return
    # Drawing billions of numbers takes a CPU minutes.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = getattr(transformers, architecture)._from_config(made, dtype=getattr(torch, dtype))
    model.save_pretrained(path)
    del model
    torch.cuda.empty_cache()  # a process that lives on would hold it beside those that read it


def work(args: argparse.Namespace, model: Path, answer: Path) -> None:
    """Be one process of a side, or the one that writes the weights."""
    cases, config = cases_of(args.shape), CONFIGS[args.shape]
    if args.worker == "write":
        import torch

        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        write_model(model, config, dtype, weights=args.shape != CONFIG_ALONE)
        return
    stream = answer_stream() if args.in_turns else None
    made = {"native": native, "bare": bare, "bare-first": bare, "bare-silent": bare}
    rollout, end = made.get(args.worker, vllm)(args, model, cases)
    if stream is not None:
        print(json.dumps({"ready": True}), file=stream)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "quit":
                break
            which = cases[command["case"]], config["vocab_size"], command["turn"]
            told = one_round(rollout, *which, args.worker)
            print(json.dumps({"seconds": told[0]}), file=stream)
        end()
        return
    found = [measure(rollout, case, config["vocab_size"], args.rounds, args.worker) for case in cases]
    if os.environ.get("RANK", "0") == "0":
        answer.write_text(json.dumps(found))
    end()


def in_turns(
    args: argparse.Namespace, sides: Sequence[str], repeats: int
) -> Iterator[tuple[Case, list[tuple[float, float]]]]:
    """Yield the seconds of both sides by repeat, a case after the other: they live at the same time, one rank each, and take turns call by call, after a
    call of each that is not counted. `args.memory_fraction` must leave room for both."""
    with tempfile.TemporaryDirectory(prefix="quintet-rollout-") as directory, ExitStack() as stack:
        model = Path(directory) / "model"
        options = ["--gpus", "1", *(["--tiny"] if args.shape == "tiny" else ["--shape", args.shape])]
        options += ["--memory-fraction", str(args.memory_fraction), "--model", str(model)]
        run_side("write", 1, model, args, options)
        live = []
        for name in sides:
            worker = ["benchmarks.rollout", *options, "--in-turns", "--worker", name]
            side = Side(name, worker, ranks=1, timeout_s=args.timeout_s, ranked=name == "native")
            stack.callback(side.kill)
            side.answer()  # before the next one starts: vLLM looks at how much memory is free
            say(f"  {name} is ready")
            live.append(side)
        for at, case in enumerate(cases_of(args.shape)):
            found = []
            for turn in range(repeats + 1):
                both = [side.ask(do="round", case=at, turn=turn)[0]["seconds"] for side in live]
                say(f"  {case.name or 'one length'}: {both[0]:.2f} s beside {both[1]:.2f} s")
                found += [(both[0], both[1])] if turn else []
            yield case, found


def run_side(
    name: str, ranks: int, model: Path, args: argparse.Namespace, options: list[str] | None = None
) -> list[list[tuple[float, float]]]:
    """What `measure` told of each case. SystemExit with the end of its log when a process fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer, logs, processes = model.parent / f"{name}.json", [], []
    for rank in range(ranks):
        logs.append((model.parent / f"{name}-{rank}.log").open("w+"))
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        # What torchrun would set; vLLM starts processes for its devices itself.
        place = {key: str(n) for key, n in numbers.items()} if name == "native" else {}
        processes.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.rollout",
                    *(sys.argv[1:] if options is None else options),
                    "--worker",
                    name,
                    "--model",
                    str(model),
                ],
                cwd=ROOT,
                env=os.environ | {"MASTER_ADDR": "127.0.0.1"} | place,
                stderr=logs[-1],
            )
        )
    print(name, flush=True)
    try:
        for process in processes:
            process.wait(args.timeout_s)
    except subprocess.TimeoutExpired:
        print(f"{name} took longer than {args.timeout_s:.0f} s", file=sys.stderr)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{name} failed:\n{log.read()[-6000:]}")
    return json.loads(answer.read_text()) if answer.exists() else []


def records_of(
    args: argparse.Namespace, metric: str, unit: str, seconds: dict[str, list[list[float]]]
) -> list[dict[str, Any]]:
    """A record a case and side, with the value of the side that it is compared with as its baseline. seconds: by side and case."""
    records = []
    for at, case in enumerate(cases_of(args.shape)):
        tokens = sum(sum(lengths) for lengths in case.response_tokens())
        values = {side: tokens / statistics.median(found[at]) for side, found in seconds.items()}
        for side, value in values.items():
            baseline = values.get(BASELINES.get(side, ""))
            records.append(
                record("rollout", case_name(args, case, side), metric, value, unit, baseline=baseline)
            )
    return records


def costs_of(args: argparse.Namespace, seconds: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Return the records of what log-probs cost, where `vllm` and `vllm-silent` were measured: of the latter's rate, the part that the
    former lacks. The median over pairs of calls, the same prompts each, so that what slows the host for a while counts little."""
    if not {"vllm", "vllm-silent"} <= seconds.keys():
        return []
    records = []
    for at, case in enumerate(cases_of(args.shape)):
        pairs = zip(seconds["vllm"][at], seconds["vllm-silent"][at], strict=False)
        cost = statistics.median(1 - silent / told for told, silent in pairs)
        records.append(record("rollout", case_name(args, case, "vllm"), "logprob_cost", cost, "fraction"))
    return records


def case_name(args: argparse.Namespace, case: Case, side: str) -> str:
    """The record's case."""
    place = "cpu" if args.shape == ON_CPU else f"{args.gpus}gpu"
    return "/".join(part for part in (args.shape, place, case.name, side) if part)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=[name for name in CONFIGS if name != "tiny"], default="qwen2.5-1.5b")
    add("--gpus", type=positive_int, default=1, help="GPUs of one rollout, tensor parallel (default 1)")
    add(
        "--tiny",
        action="store_true",
        help="a dry run with tiny sizes, on a CPU where there is no GPU; writes no records",
    )
    add("--only", nargs="+", choices=SIDES, help="these sides alone (default native and vllm)")
    add("--rounds", type=positive_int, default=3, help="measured calls of each case a turn (default 3)")
    add(
        "--turns",
        type=positive_int,
        default=1,
        help="how often each side is started, in turns with the other (default 1)",
    )
    add(
        "--call-by-call",
        action="store_true",
        help="two sides that are on one GPU at the same time and take turns with each call: for small differences",
    )
    add("--timeout-s", type=float, default=900.0, help="longest that a side may take (default 900)")
    add("--out", type=Path, default=RESULTS / "rollout.json", help="records are merged into this file")
    add(
        "--memory-fraction",
        type=float,
        help=f"of the GPU, for vLLM (default {MEMORY_FRACTION}, with --call-by-call {OF_TWO} each)",
    )
    add("--in-turns", action="store_true", help=argparse.SUPPRESS)
    add("--worker", choices=("write", *SIDES), help=argparse.SUPPRESS)
    add("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.tiny:
        args.shape = "tiny"
    if args.shape == ON_CPU and args.gpus != 1:
        parser.error(f"--shape {ON_CPU} runs on a CPU, in one process: leave --gpus out")
    if args.memory_fraction is None:
        args.memory_fraction = OF_TWO if args.call_by_call else MEMORY_FRACTION
    if args.call_by_call and (
        args.shape == ON_CPU or (args.gpus, args.turns, len(args.only or SIDES[:2])) != (1, 1, 2)
    ):
        parser.error(
            f"--call-by-call is of two sides on one GPU, started once: name two with --only, leave --gpus, --turns and --shape {ON_CPU} out"
        )
    return args


def _column(found: dict[str, list[list[tuple[float, float]]]], at: int) -> dict[str, list[list[float]]]:
    return {side: [[one[at] for one in rounds] for rounds in cases] for side, cases in found.items()}


@user_errors_told()
def main() -> None:
    """Run the sides one after the other, print what came out, and write the records."""
    args = arguments()
    if args.shape == ON_CPU:
        # One thread a side: with more, what is measured is how well the machine's other work gets out of the way.
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if args.worker:
        work(args, args.model, args.model.parent / f"{args.worker}.json")
        return
    if args.shape != ON_CPU and not args.shape.startswith("tiny"):
        need_gpus(args.gpus, f"--shape {ON_CPU}")
    sides: list[str] = args.only or ["native", "vllm"]
    end_at_sigterm()
    if args.call_by_call:
        by_case = [pairs for _, pairs in in_turns(args, sides, args.rounds)]
        calls = {
            side: [[(pair[at], 0.0) for pair in pairs] for pairs in by_case] for at, side in enumerate(sides)
        }
        keep(args, calls, sides)
        return
    with tempfile.TemporaryDirectory(prefix="quintet-rollout-") as directory:
        model = Path(directory) / "model"
        run_side("write", 1, model, args)
        found: dict[str, list[list[tuple[float, float]]]] = {}
        try:
            for side in sides * args.turns:
                of_side = found.setdefault(side, [[] for _ in cases_of(args.shape)])
                for rounds, more in zip(
                    of_side, run_side(side, args.gpus if side == "native" else 1, model, args), strict=True
                ):
                    rounds += more
        finally:
            keep(args, {side: rounds for side, rounds in found.items() if all(rounds)}, sides)


def keep(
    args: argparse.Namespace, found: dict[str, list[list[tuple[float, float]]]], sides: Sequence[str]
) -> None:
    """Print and write the records of what was found; none of a side whose baseline was to come."""
    import torch  # noqa: F401  (names the GPUs in records; only now, as it takes memory of them)

    records = records_of(args, "tokens_per_second", "tokens/s", _column(found, 0))
    if args.shape == ON_CPU:
        records += records_of(args, "tokens_per_cpu_second", "tokens/CPU s", _column(found, 1))
    for one in records:
        print(f"{one['case']}: {one['value']:,.0f} {one['unit']}", flush=True)
    costs = costs_of(args, _column(found, int(args.shape == ON_CPU)))
    for one in costs:
        reached = "reached" if one["value"] <= LOGPROB_COST else "missed"
        print(
            f"{one['case']}: log-probs cost {one['value']:.1%} (aim: {LOGPROB_COST:.0%}, {reached})",
            flush=True,
        )
    missing = {side for side, baseline in BASELINES.items() if baseline in sides and baseline not in found}
    if "vllm-silent" in sides and "bare" not in sides:
        missing.add("vllm")  # its rate is the baseline of the other's; its own record stays beside vLLM alone
    if not args.shape.startswith("tiny"):
        kept = [one for one in records if one["case"].rpartition("/")[2] not in missing]
        write_records(args.out, merged(args.out, [*kept, *costs]))


if __name__ == "__main__":
    main()
