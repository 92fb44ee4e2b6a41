"""Has anything become slower or wrong on GPUs? The oracle, what runs on GPUs alone of the engine, a run with vLLM that is killed and resumed, tests of vLLM, its
processes that are killed, what FP8 claims, five benchmarks held to records.

    python -m benchmarks.gpu_check                                  all parts but sglang, one after the other
    python -m benchmarks.gpu_check --part engine                    one of them: each takes less than nine minutes
    python -m benchmarks.gpu_check --part rollout sync --record     and keep what was measured as the records
    python -m benchmarks.gpu_check --part sglang                    SGLang, in an environment that has it in vLLM's place
    python -m benchmarks.gpu_check --tiny --part engine sync        a dry run of the plumbing, on a CPU too

For one to four GPUs of one machine; what cannot run on as many as are found is named. A benchmark's two sides live at the same
time and take turns three times; what counts is the median of the three ratios of value to baseline: that, or the value itself, is to be
at most 8% below the record in benchmarks/results for the same card. Exit status 1 for whatever failed, could not be measured, or has no record.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, ROOT, merged, middle, read_records, record, write_records

REPEATS = 3
WORST_FALL = 0.08
PART_S = 540.0
ORACLE = {"oracle-te": "transformer_engine", "oracle-portable": "portable"}
PARTS = (*ORACLE, "kernels", "steps", "scheduler", "vllm", "kills", "fp8", "engine", "rollout", "sync")
EXTRAS = {"vllm": "'.[vllm]'", "sglang": "'.[sglang]'"}
"""What brings a package that quintet itself does not."""
ELSEWHERE = ("sglang",)
"""What runs only where it is named: it needs another environment than the rest."""
NEVER_TINY = {*ORACLE, "kernels", "scheduler", "vllm", "kills", *ELSEWHERE}
"""What has no dry run."""
Repeats = list[tuple[float, float]]
"""Value and baseline of each repeat, both the more the better."""


@dataclass(frozen=True)
class Check:
    """A benchmark's case that is held to its record. beside: the case whose record is the baseline of this one's, where it has one:
    a record whose baseline is another value was compared with something else."""

    part: str
    case: str
    metric: str
    unit: str
    gpus: int = 1
    beside: str = ""

    @property
    def name(self) -> str:
        return f"{self.part} {self.case}"


CHECKS = (
    Check("engine", "qwen2.5-1.5b/te", "tokens_per_s_per_gpu", "tokens/s"),
    Check("engine", "qwen2.5-1.5b/portable", "tokens_per_s_per_gpu", "tokens/s"),
    Check(
        "rollout", "qwen2.5-1.5b/1gpu/vllm", "tokens_per_second", "tokens/s", beside="qwen2.5-1.5b/1gpu/bare"
    ),
    Check(
        "rollout",
        "qwen2.5-1.5b/1gpu/long-tail/vllm",
        "tokens_per_second",
        "tokens/s",
        beside="qwen2.5-1.5b/1gpu/long-tail/bare",
    ),
    Check("sync", "qwen3-8b/1gpu", "gb_s", "GB/s"),
    Check("sync", "qwen3-30b-a3b/2gpu", "gb_s", "GB/s", gpus=2),
)
TINY = (
    Check("engine", "tiny/portable", "tokens_per_s_per_gpu", "tokens/s"),
    Check("rollout", "tiny/1gpu/native", "tokens_per_second", "tokens/s"),
    Check("rollout", "tiny/1gpu/long-tail/native", "tokens_per_second", "tokens/s"),
    Check("sync", "tiny/2cpu", "gb_s", "GB/s"),
)
FILES = {"engine": "engine.json", "rollout": "rollout.json", "sync": "sync.json"}
"""Where the records of a part are."""


def chosen(checks: Sequence[Check], parts: Sequence[str], gpus: int) -> tuple[list[Check], list[str]]:
    """The checks of these parts that run on so many GPUs, and a line for each that does not."""
    of_parts = [one for one in checks if one.part in parts]
    too_large = [
        f"{one.name}: not run, it needs {one.gpus} GPUs and {gpus} were found"
        for one in of_parts
        if one.gpus > gpus
    ]
    return [one for one in of_parts if one.gpus <= gpus], too_large


def recorded(check: Check, hardware: str, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The record that a check is held to: of this hardware, and compared with the same."""
    mine = [one for one in records if (one["metric"], one["hardware"]) == (check.metric, hardware)]
    by_case = {one["case"]: one for one in mine}
    found = by_case.get(check.case)
    if found is None or not found["baseline"]:
        return None
    beside = by_case.get(check.beside)
    return None if check.beside and (beside is None or beside["value"] != found["baseline"]) else found


def judged(check: Check, repeats: Repeats, hardware: str, found: dict[str, Any] | None) -> tuple[bool, str]:
    """Whether a check passes, and the line that says so and what to do otherwise. found: the record, None without one."""
    value, baseline = middle(repeats)
    ratio = value / baseline
    each = ", ".join(f"{v / b:.3f}" for v, b in repeats)
    told = f"{check.name}: {value:,.4g} {check.unit}, {ratio:.3f} of the baseline's {baseline:,.4g} (repeats: {each})"
    anew = f"make test-gpu PART={check.part} ARGS=--record"
    if found is None:
        return (
            False,
            f"{told}; there is no record of {hardware} beside the same baseline to hold it to: {anew} writes it",
        )
    kept = found["value"] / found["baseline"]
    change = ratio / kept - 1
    told += f", {change:+.1%} against the record's {kept:.3f}"
    # On a faster host the baseline alone may gain: what the card limits stays as it was.
    if change >= -WORST_FALL or value >= (1 - WORST_FALL) * found["value"]:
        return True, told
    return False, (
        f"{told}, and at most {-WORST_FALL:.0%} may be lost: look for what became slower since commit {found['commit']} of "
        f"{found['date']} (python -m benchmarks.{check.part} measures more of it), or, if it is meant, record it: {anew}"
    )


# What measures, each in a process of its own: repeats by case.


def measure_engine(checks: Sequence[Check]) -> dict[str, Repeats]:
    from benchmarks import engine

    found = {}
    for check in checks:
        shape, backend = check.case.split("/")
        args = engine.arguments(["--shape", shape, "--backend", backend])
        if shape == "tiny":
            args.steps_per_turn = 1
        setup = engine.setup_of(shape, backend=engine.BACKENDS[backend])
        with engine.Turns(setup, list(engine.SIDES), args) as turns:
            for turn in range(REPEATS):
                turns.take(first=turn == 0)
        engine.check_same_work(turns.measured)
        by_side = {}
        for name, side in turns.measured.items():
            n = args.steps_per_turn
            bursts = [side.seconds[at : at + n] for at in range(0, len(side.seconds), n)]
            by_side[name] = [setup.tokens_per_step / setup.gpus / statistics.median(one) for one in bursts]
        found[check.case] = list(zip(by_side["quintet"], by_side["raw"], strict=True))
    return found


def measure_rollout(checks: Sequence[Check]) -> dict[str, Repeats]:
    from benchmarks import rollout

    tiny = checks[0].case.startswith("tiny")
    # Both sides' keys and values lie on the card at the same time.
    args = rollout.arguments(["--memory-fraction", "0.4", *(["--tiny"] if tiny else [])])
    sides = ("native", "native") if tiny else ("vllm", "bare")
    found = {}
    for case, of_case in rollout.in_turns(args, sides, REPEATS):
        tokens = sum(sum(lengths) for lengths in case.response_tokens())
        name = "/".join(part for part in (args.shape, "1gpu", case.name, sides[0]) if part)
        found[name] = [(tokens / ours, tokens / theirs) for ours, theirs in of_case]
    return found


def measure_sync(checks: Sequence[Check]) -> dict[str, Repeats]:
    from benchmarks import sync

    found = {}
    for check in checks:
        model, place = check.case.split("/")
        ranks, device = int(place[0]), "cpu" if place.endswith("cpu") else "cuda"
        train, generate = sync.layouts(model, ranks)
        bucket_mib = 1 if model == "tiny" else 256
        setup = sync.Setup(model, device, ranks, train, generate, False, bucket_mib)
        found[check.case] = sync.in_turns(setup, REPEATS, rounds=5)
    return found


MEASURE: dict[str, Callable[[Sequence[Check]], dict[str, Repeats]]] = {
    "engine": measure_engine,
    "rollout": measure_rollout,
    "sync": measure_sync,
}


def work(checks: Sequence[Check], answer: Path) -> None:
    """Measure, and write the records with their repeats."""
    part, gpus = checks[0].part, checks[0].gpus
    found = MEASURE[part](checks)
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() != gpus:
        raise SystemExit(f"{part} was to see {gpus} GPUs and sees {torch.cuda.device_count()}")
    made = []
    for check in checks:
        value, baseline = middle(found[check.case])
        one = record(part, check.case, check.metric, value, check.unit, baseline=baseline)
        told = [one | {"command": f"python -m benchmarks.gpu_check --part {part} --record"}]
        told += (
            [told[0] | {"case": check.beside, "value": baseline, "baseline": None}] if check.beside else []
        )
        made.append({"repeats": found[check.case], "records": told})
    answer.write_text(json.dumps(made))


def status_of(command: Sequence[str], limit_s: float, environment: dict[str, str] | None = None) -> str:
    """Run a module of this tree, and whatever it starts, to the end: empty when it succeeded, else how it ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        status = process.wait(max(limit_s, 0))
    except subprocess.TimeoutExpired:
        return "the part took too long"
    finally:
        with contextlib.suppress(ProcessLookupError):
            # Its children may outlive it, and would slow the next part.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"exit status {status}, the error is above" if status else ""


def measured(checks: Sequence[Check], limit_s: float, tiny: bool) -> list[dict[str, Any]] | str:
    """What `work` wrote, of a process that sees as many GPUs as the checks need; a text when it failed."""
    gpus, cases = checks[0].gpus, [one.case for one in checks]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(n) for n in range(gpus))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:gpus])}
    with tempfile.TemporaryDirectory(prefix="quintet-gpu-check-") as directory:
        answer = Path(directory) / "answer.json"
        command = ["benchmarks.gpu_check", "--worker", str(answer), "--case", *cases]
        wrong = status_of([*command, *(["--tiny"] if tiny else [])], limit_s, environment)
        return wrong or json.loads(answer.read_text())


def run_benchmarks(part: str, gpus: int, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Run the benchmarks of a part: a line for each that passed or is left out, and for each that failed."""
    until = time.monotonic() + options.part_s
    checks, told = chosen(TINY if options.tiny else CHECKS, [part], gpus)
    failed = []
    file = RESULTS / FILES[part]
    for number in sorted({one.gpus for one in checks}):
        same = [one for one in checks if one.gpus == number]
        answers = measured(same, until - time.monotonic(), options.tiny)
        if isinstance(answers, str):
            failed += [f"{one.name}: not measured: {answers}" for one in same]
            continue
        for check, answer in zip(same, answers, strict=True):
            records, hardware = answer["records"], answer["records"][0]["hardware"]
            held_to = recorded(check, hardware, read_records(file) if file.exists() else [])
            passed, line = judged(check, answer["repeats"], hardware, held_to)
            if options.out:
                write_records(options.out, merged(options.out, records))
            if options.record:
                write_records(file, merged(file, records))
                passed, line = True, f"{line}; recorded in {file.relative_to(ROOT)}"
            (told if passed or options.tiny else failed).append(line)
    return told, failed


def run_oracle(part: str, gpus: int, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Run the oracle with one back end of layers, on as many of the GPUs as it can use: lines as of `run_benchmarks`."""
    used = max(n for n in (1, 2, 4) if n <= gpus)
    told = [f"{part}: ran on {used} of the {gpus} GPUs found"] if used != gpus else []
    command = ["tests.oracle", "--gpus", str(used), "--backend", ORACLE[part]]
    out = ["--json", str(options.out.with_name(f"{options.out.stem}-{part}.json"))] if options.out else []
    if wrong := status_of([*command, *out], options.part_s):
        return told, [f"{part}: {wrong}; a case of it again: python -m {' '.join(command)} -k NAME"]
    return [*told, f"{part}: every case is within its bounds"], []


def run_module(command: Sequence[str], holds: str, part: str, limit_s: float) -> tuple[list[str], list[str]]:
    """Run a module that succeeds where what is said holds: lines as of `run_benchmarks`."""
    if wrong := status_of(command, limit_s):
        return [], [f"{part}: {wrong}"]
    return [f"{part}: {holds}"], []


def run_steps(part: str, gpus: int, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Run `benchmarks.gpu_steps` on all GPUs."""
    command = ["benchmarks.gpu_steps", "--gpus", str(gpus), *(["--tiny"] if options.tiny else [])]
    return run_module(command, "killed, resumed, and better than before training", part, options.part_s)


def run_tests(names: Sequence[str], needs: str, holds: str) -> Callable[..., tuple[list[str], list[str]]]:
    """Return what runs tests of a back end that it needs, by file or by name, those not for nights alone: lines as of `run_benchmarks`."""
    # Of the settings of this tree some are of plugins, which a GPU machine need not have.
    bare = f"-c {os.devnull} --rootdir . --import-mode=importlib -p no:cacheprovider -W ignore -rs".split()
    command = ["pytest", *bare, "-m", "not nightly"]

    def run(part: str, gpus: int, options: argparse.Namespace) -> tuple[list[str], list[str]]:
        if importlib.util.find_spec(needs) is None:
            return [], [f"{part}: {needs} is not installed here: pip install -e {EXTRAS.get(needs, '.')}"]
        for name in names:  # a process each: on a GPU vLLM refuses the second engine that sleeps in one
            if wrong := status_of([*command, name], options.part_s):
                return [], [f"{part}: {name}: {wrong}"]
        return [f"{part}: {holds}"], []

    return run


def run_fp8(part: str, gpus: int, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Run `benchmarks.fp8_proof` on one GPU."""
    with tempfile.TemporaryDirectory() as scratch:
        out = [] if options.record else ["--out", str(options.out or Path(scratch) / "fp8.json")]
        command = ["benchmarks.fp8_proof", *(["--tiny"] if options.tiny else out)]
        return run_module(command, "every claim holds", part, options.part_s)


ROUTES = (
    "routes_are_those_of_transformers",
    "routes_of_preempted_requests_are_theirs",
    "routes_are_of_the_forward_that_log_probs_are_of",
    "with_replay_rounding_is_all_that_parts_trainer_and_vllm[qwen3_moe]",
    "with_replay_rounding_is_all_that_parts_trainer_and_vllm[mixtral]",
)
KERNELS = (
    "copies",
    "fingerprint",
    "head",
    "kernels",
    "mlp",
    "offload",
    "optimizer",
    "parameter_gather",
    "rotary",
)
TESTS = {
    "kernels": run_tests(
        [f"tests/engine/test_{name}.py" for name in KERNELS],
        "megatron",
        "fused kernels, offload and the optimizer compute what plain ones do",
    ),
    "scheduler": run_tests(
        [
            f"tests/rollout/vllm/test_{name}.py"
            for name in ("scheduled_steps", "captured_steps", "captured_wide")
        ],
        "vllm",
        "steps scheduled and drawn here are those of vLLM",
    ),
    "vllm": run_tests(
        [
            *(f"tests/rollout/{name}.py" for name in ("test_noise", "vllm/test_offline", "vllm/test_update")),
            # Each of these has an engine of its own.
            *(f"tests/rollout/vllm/test_routes.py::test_{name}" for name in ROUTES),
        ],
        "vllm",
        "it draws, tells and takes what it should",
    ),
    "kills": run_tests(
        ["tests/rollout/vllm/test_deaths.py", "tests/sync/test_group_on_gpus.py"],
        "vllm",
        "started anew or left, and no sample is missing",
    ),
    "sglang": run_tests(
        ["tests/rollout/sglang/test_real.py"], "sglang", "it draws, tells and takes what it should"
    ),
}
"""Parts that are tests."""
RUN = dict.fromkeys(ORACLE, run_oracle) | {"steps": run_steps, "fp8": run_fp8} | TESTS
"""What runs a part that is no benchmark."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", nargs="+", choices=(*PARTS, *ELSEWHERE), help="these parts alone (default: all but sglang)")
    add("--record", action="store_true", help="keep what the benchmarks measure as their records")
    add("--out", type=Path, help="also write the measured records to this file; the oracle's go beside it")
    add(
        "--part-s",
        type=float,
        default=PART_S,
        help=f"longest that a part may take, each process of one of tests (default {PART_S:.0f})",
    )
    add(
        "--tiny",
        action="store_true",
        help="a dry run of the benchmarks with tiny sizes; holds nothing to records",
    )
    add("--worker", type=Path, help=argparse.SUPPRESS)
    add("--case", nargs="+", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.part = options.part or [part for part in PARTS if not (options.tiny and part in NEVER_TINY)]
    if options.tiny and (options.record or options.out or set(options.part) & NEVER_TINY):
        parser.error(
            "--tiny is a dry run of the benchmarks: leave --record, --out, the oracle's parts, kernels, scheduler, vllm, kills and sglang out"
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.worker:
        work([one for one in (*CHECKS, *TINY) if one.case in options.case], options.worker)
        return 0
    import torch

    gpus = min(torch.cuda.device_count(), 4)
    if not gpus and not options.tiny:
        print("no GPU was found; --tiny tries the plumbing without one", file=sys.stderr)
        return 1
    print(f"{gpus} GPUs: {', '.join(options.part)}", flush=True)
    told: list[str] = []
    failed: list[str] = []
    for part in options.part:
        print(f"=== {part}", flush=True)
        began = time.monotonic()
        run = RUN.get(part, run_benchmarks)
        for lines, more in zip((told, failed), run(part, max(gpus, int(options.tiny)), options), strict=True):
            lines += more
        print(f"=== {part}: {time.monotonic() - began:.0f} s", flush=True)
    print(*told, *(f"FAILED {line}" for line in failed), sep="\n", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
