"""Memory and seconds of a GRPO step by phase: what `quintet plan` says of a recipe beside what its run measures.

    python -m benchmarks.plan                                                      Qwen2.5-1.5B's shape on one GPU, with vLLM
    python -m benchmarks.plan --gpus 4 --shape qwen3-8b layout.tp=2 layout.sp=true  other keys of the recipe
    python -m benchmarks.plan --tiny                                               a dry run on a CPU, native generation

Random weights, 128 prompts of 256 tokens, 4 samples of 512 each, as in `rollout`; two mini-batches, so that old log-probs are a phase of
their own. Trainer and vLLM take turns, with all training state away while vLLM generates. Of memory the most counts that any step after
the first had in use on the fullest device, whoever used it: CUDA's contexts and what torch and NCCL keep count, which the plan leaves out.
Of seconds it is the median of these steps. In the records the plan's number is the baseline. A checkpoint is saved before the last step, and
the run goes on from the one after it for a step more: `save` and `load`, of which host memory counts, too, as the ranks hold it, Python and all. Two checkpoints of 14 bytes a weight have to fit beside
each other where temporary files go.
A CPU has no such memory, and its processes' own is mostly Python: there the seconds and both numbers are printed, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import killed, steps_of
from benchmarks.options import end_at_sigterm, positive_int, user_errors_told
from benchmarks.records import RESULTS, ROOT, merged, record, write_records
from benchmarks.rollout_work import CONFIGS, Case, cases_of
from benchmarks.step import work_of, write_inputs
from quintet.plan.cards import card_of
from quintet.plan.phases import plan_stages
from quintet.plan.seconds import plan_seconds, samples_of
from quintet.recipe.loader import load_recipe
from quintet.recipe.rules import shape_of

FILE = RESULTS / "plan.json"
PHASES = ("generate", "logprob", "train", "sync")
CHECKPOINTS = ("save", "load")
GIB = float(1 << 30)
AWAY = ("engine.offload_params=1.0", "engine.offload_grads=1.0", "engine.offload_optimizer=1.0")


def words_of(args: argparse.Namespace, directory: Path) -> list[str]:
    """Return the recipe: the model's directory and overrides. Model and prompts are written first."""
    # A process of its own draws weights on a device, whose memory is measured here.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        model = apart.submit(write_inputs, directory, CONFIGS[args.shape]).result()
    (case,) = (one for one in cases_of(args.shape) if not one.name)
    rows = [{"prompt": prompt, "answer": "a"} for prompt in work_of(case, args.steps)["prompts"]]
    data = directory / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [
        str(model),
        *(
            f"data.train_path={data}",
            f"run.dir={directory / 'runs'}",
            "data.chat=false",
        ),
        *_samples(case),
        *("train.mini_batches_per_step=2", "train.eval_prompts=0", "resume=auto"),
        *(f"cluster.ranks={args.gpus}", f"engine.tokens_per_microbatch_per_rank={args.tokens}"),
        *(f"checkpoint.every_steps={args.steps}", "checkpoint.keep_last=1", "reward.function=length"),
    ]
    if args.tiny:
        return [*words, "cluster.device=cpu", "model.dtype=fp32", *args.overrides]
    vllm = ("rollout.backend=vllm", "rollout.memory_fraction=0.4", "cluster.device=cuda", "model.dtype=bf16")
    return [*words, *vllm, *AWAY, *args.overrides]


def _samples(case: Case) -> list[str]:
    return [
        f"train.prompts_per_step={case.prompts}",
        f"rollout.samples_per_prompt={case.samples_per_prompt}",
        f"data.max_prompt_tokens={case.prompt_tokens}",
        f"rollout.max_response_tokens={case.longest}",
        f"rollout.sequences_per_rank={case.prompts * case.samples_per_prompt}",
    ]


def planned(words: list[str], device: str, device_bytes: int | None) -> dict[str, float | None]:
    """Return what the plan says by metric, `<phase>_gib`, `<phase>_host_gib` of load and save, and `<phase>_s`; None for seconds on a device of
    which no rates are known."""
    recipe = load_recipe(words[0], words[1:])
    shape = shape_of(recipe)
    assert shape is not None
    stages, card = plan_stages(recipe, shape, device_bytes), card_of(device)
    times = plan_seconds(recipe, shape, card, samples_of(recipe), device_bytes) if card else {}
    memory = {f"{p}_gib": max(one.device[p] for one in stages) / GIB for p in (*PHASES, *CHECKPOINTS)}
    memory |= {f"{p}_host_gib": max(one.host[p] for one in stages) / GIB for p in CHECKPOINTS}
    return memory | {f"{phase}_s": times[phase].seconds if card else None for phase in PHASES}


def measured(steps: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """Return the same of a run's steps but the first, of the phases that it has: none syncs weights that it shares; the last one is that of
    the run that went on. kind: of memory, device or host."""
    *rest, resumed = steps[1:]
    phases = [phase for phase in PHASES if f"memory/{phase}_{kind}_gib" in rest[0]]
    found = {f"{p}_gib": max(one[f"memory/{p}_{kind}_gib"] for one in rest) for p in phases}
    for phase, lines in zip(CHECKPOINTS, (rest, [resumed]), strict=True):
        for metric, which in ((f"{phase}_gib", kind), (f"{phase}_host_gib", "host")):
            found[metric] = max(one.get(f"memory/checkpoint_{which}_gib", 0.0) for one in lines)
    return found | {f"{p}_s": statistics.median(one[f"seconds/{p}"] for one in rest) for p in phases}


def run(words: list[str], limit_s: float) -> None:
    """Run the recipe to its end. SystemExit where it fails, or takes longer: it is killed then, with all that it started."""
    process = subprocess.Popen([sys.executable, "-m", "quintet", "train", *words], cwd=ROOT)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        killed(process)
        raise SystemExit(
            f"the run was not done in {limit_s:.0f} s and was killed: --steps makes it shorter, --limit-s lets it run longer"
        ) from None
    except BaseException:
        killed(process)
        raise
    if status:
        raise SystemExit(f"the run ended with status {status}; see what it printed above")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--gpus", type=positive_int, default=1)
    parser.add_argument("--shape", choices=sorted(CONFIGS), default="qwen2.5-1.5b")
    parser.add_argument("--steps", type=positive_int, default=3, help="after the first")
    parser.add_argument("--tokens", type=positive_int, default=16384, help="of a micro-batch a GPU")
    parser.add_argument("--limit-s", type=float, default=500.0, help="a run that takes longer is killed")
    parser.add_argument(
        "--out", type=Path, default=FILE, help="records are merged into this file, with --write"
    )
    parser.add_argument("--write", action="store_true", help="keep the records")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU")
    args = parser.parse_args(argv)
    if args.tiny:
        args.shape, args.tokens = "tiny", 256
    return args


@user_errors_told()
def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    end_at_sigterm()
    with tempfile.TemporaryDirectory(prefix="quintet-plan-") as directory:
        words = words_of(args, Path(directory))
        device, device_bytes = _device(args)
        plan = planned(words, device, device_bytes)
        too_large(plan, device_bytes)
        for last in (args.steps + 1, args.steps + 2):
            run([*words, f"train.steps={last}"], args.limit_s)
        steps = steps_of(Path(directory) / "runs")
    kind = "host" if args.tiny else "device"
    records = []
    print(f"on {device}, memory of the {kind}:")
    for metric, value in measured(steps, kind).items():
        said = plan[metric]
        print(f"  {metric:14} {value:10.3f} measured {'-' if said is None else f'{said:10.3f}':>10} planned")
        case = "/".join([args.shape, f"{args.gpus}gpu", *args.overrides])
        unit = "GiB" if metric.endswith("_gib") else "s"
        records.append(record("plan", case, metric, value, unit, baseline=said))
    if args.write and not args.tiny:
        write_records(args.out, merged(args.out, records))


def too_large(plan: dict[str, float | None], device_bytes: int | None) -> None:
    """SystemExit where a phase is planned to take more than the device has."""
    for phase in (*PHASES, *CHECKPOINTS):
        said = plan[f"{phase}_gib"]
        if device_bytes is not None and said is not None and said > device_bytes / GIB:
            raise SystemExit(
                f"{phase} is planned to take {said:.0f} GiB of a device of {device_bytes / GIB:.0f}, so the run is not started: give keys that "
                "make it smaller (quintet plan RECIPE --gpu-gib says which), --tokens, or another --shape"
            )


def _device(args: argparse.Namespace) -> tuple[str, int | None]:
    """The device's name and size. A process of its own asks, since asking takes memory of the device."""
    if args.tiny:
        return "a CPU", None
    ask = "import torch; one = torch.cuda.get_device_properties(0); print(one.total_memory, one.name)"
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise SystemExit("no GPU was found; --tiny is a dry run on a CPU")
    size, _, name = asked.stdout.strip().partition(" ")
    return name, int(size)


if __name__ == "__main__":
    main()
