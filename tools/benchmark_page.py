"""Writes docs/performance.md from the records in benchmarks/results; what limits a case is told beside them.

python tools/benchmark_page.py            # write it
python tools/benchmark_page.py --check    # exit 1 when it is not what the records say
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"

HEAD = """# Performance

What has been measured, and what limits it. Every number in a table is a record of [benchmarks/results](../benchmarks/results); what is in none has
no record. This page is made by `python tools/benchmark_page.py`.

## Method

- The baseline is the same metric of what a case is compared with, in the same run on the same device; the ratio is value over baseline. The two sides
  have taken turns, or one has run after the other, as in `step`, in `rollout` without `--turns` and in `engine` with `--sequential --rounds 1`: what slowed
  the machine meanwhile has then slowed one of them alone. Of seconds and memory a ratio below 1 is the better, of rates one above 1. Without a baseline
  there is nothing to compare with.
- Under each table stand the command that makes it, device, date, commit and versions. Case by case,
  [benchmarks/README.md](../benchmarks/README.md) says what is timed, what is not, and what must be the same on both sides; a command fails
  where it is not.
- Weights are random but of a published model's shape where a case is named after one. `make test-gpu` holds a machine to ratios or values, within 8%.
"""
LIMITS: dict[str, str | dict[str, str]] = {
    "checkpoint": "the disk, whose own rate stands first in the table and as the baseline of what is written and read; `async_save` is cut "
    "to what the host must copy before the next step.",
    "dynamic_cp": "two and four ranks lose little by sharing every row (`ceiling`), over NVLink or through the host, and what is left to gain is little; with "
    "experts, and without them on the hosts of two tables, launches: a micro-batch took 0.15 to 0.19 s there whatever was in it (`fixed`). A `step` is "
    "as long as its generation. `plans` is no speed: how far random plans are from whole blocks.",
    "engine": {
        "": "`mfu` is the part of the card's dense bf16 rate that is used; attention of ragged lengths, kernels that move memory and compute little, and "
        "the host's launches share the rest, and no record tells them apart.",
        "qwen2.5-1.5b": "the host as well: where as many processes as it has cores keep it busy (`busy-16`) both take as long, where 1.03 was aimed for and plain layers were not measured; on an idle one quintet does 1.05 of what "
        "megatron-core alone does. Of two stages (`pp2`) each waits for the other in a fifth of the time, with four micro-batches.",
        "qwen3-8b": "memory, which decides what is computed again. Of four GPUs at rows of 16k `mfu` was 0.41 where all is (2026-11-22, in no record), is 0.47 "
        "with the MLPs alone, and 0.56 with what lies between products, which fits 141 GB; rows of 8k fit without, at 0.5499 where 0.55 was aimed for. Plain layers "
        "(portable) on eight had 0.25, in no record either. Then each rank of the benchmark took a thread for each of the host's cores, and packing waited for them: on a host of 64 four ranks "
        "took 4.2 s a step where one took 1.44. Ranks of a run have one each, and since 2026-11-28 the benchmark's too; they were not measured again. Of 12 layers two GPUs (dp2) train 30,566 tokens/s each where one "
        "trains 30,498; four have no record beside one.",
        "qwen3-30b-a3b": "the sending of tokens between ranks, and what the fullest rank has to compute: routers with random weights choose more unevenly than trained "
        "ones. Three steps a depth are measured, so that a line through two depths is less certain than either; megatron-core alone launches its experts one by one.",
    },
    "expert_kernels": "the host, which launches the products of TransformerEngine's experts one by one, 128 a layer where a rank holds all and 32 at "
    "`layout.ep=4`; torch's are one launch. Until 2026-11-27 the ratios here are of the medians of all steps, and those that "
    "runs choose by medians of the turns' ratios, as here since: of `moe_permute_fusion` these were 0.95 and 1.16, which do not tell whether it is faster.",
    "experts": "memory and the size of the products: 1,024 rows an expert are enough to keep a GPU busy with one product at a time, so that a single launch "
    "for all gains less than the five times that were aimed for.",
    "fingerprints": "one pass over all weights; it reads them at a third of what the card's memory gives at most.",
    "handover": "generation, three fifths of the step, and of it the longest response: some 300 steps of few sequences, of 1.8 ms each, which is the GPU's own time; a step of 1.2 s was aimed for. "
    "Where all fits nothing moves but weights: the rollout stays awake. `controller_share` is planning and scattering (2%), and 23 ms in no phase, of which 9 ask "
    "ranks for their memory and counts. With all of training's state away it is the link, too, and the taking and giving back of memory. Gradients leave and come back "
    "without a copy, and are not counted. What leaves for the first time pins host memory.",
    "kv_cache": "memory bandwidth: slots or pages are read once a token.",
    "fp8": "what is not multiplied in 8 bits (attention, head, norms, optimizer), and rounding, which passes over memory: at a model's full depth "
    "head and optimizer are a smaller part, so that more is gained than at 8 layers. Of 128 experts each is rounded and multiplied by launches of "
    "its own, where bf16 has torch's one launch for all; under the profiler the GPU computes for 440 ms of a step's 1,014. `proof` is no speed: how far 8 bits are from bf16.",
    "gsm8k": "what 135M parameters can learn of it: with all weights rewards rise no more after 130 steps. Sampled answers become as good as greedy ones, "
    "which a warm-up of two epochs has brought so far that GRPO adds little to them; after that of the adapters, which is weaker, it adds 1.8 points. "
    "Of a step nearly half is generation.",
    "laptop_grpo": "two cores, shared with whatever else the machine does.",
    "laptop_real": "two cores, shared with whatever else the machine does.",
    "memory": "nothing here is a speed but `offload_s` and `reload_s`, which the link between GPU and host limits; the others say how near "
    "the formula of `quintet check` comes.",
    "mtp": "the host: a step of a 400M model is as long as its launches, with drafts as without, so that tokens/s without drafts moved by a third "
    "between runs; at 256 sequences, the verification of more tokens than a captured graph has.",
    "oracle": "no speed: how far results are from one transformers process.",
    "plan": "no speed: how near `quintet plan`, the baseline, comes. Measured memory has CUDA's contexts and what torch keeps in it, which is not planned: of the 7 GiB "
    "more while vLLM is awake it has 2.0 itself beyond its share of the device, for captured graphs and its context, the trainer 1.5 for its context, and 3.2 that it kept "
    "since its first training, for TransformerEngine's sake, and gives back since 2026-11-29. Asleep vLLM holds 2.2 GiB. While it saves, torch still has what training took. On the host "
    "6 GiB are Python's and its libraries'; of 10 more while it loads we do not know whose they are. Seconds are planned at the best.",
    "rollout": {
        "laptop": "two cores, shared with whatever else the machine does.",
        "qwen2.5-1.5b/1gpu/native, long-tail/native": "the host, which launches one kernel after the other for each token.",
        "qwen2.5-1.5b/1gpu/vllm": "the GPU, for 512 sequences of a small model, whose steps quintet schedules in a tenth of vLLM's time. In a long tail a step of few "
        "sequences is the GPU's own time, which replays it. Log-probs cost less than the 3% aimed for (`logprob_cost`): they stay on the device, and those of samples "
        "that end together are fetched in one call.",
        "qwen2.5-1.5b/1gpu/bare": "the host, by which vLLM itself moves from run to run. `bare-first` is its first model runner, which it takes by itself, and `bare-silent` its "
        "second without log-probs, both on another host than the others.",
        "qwen3-8b": "the GPU in steps of many sequences; in those of few it was the host when this was measured.",
    },
    "routes": "of training, the host: a GPU computes for 1.0 s of a step's 1.5 to 1.8 s, so that seconds are no measure of what replay costs, and why the step "
    "without it takes longer is not known; `kernel_s` and `host_ms` are its own. Of the rollout, two pairs of calls: an interval that holds 0.",
    "step": "generation, two to three fifths of a step, and three or more of TRL's (`generate_s_median`). Responses of long-tailed lengths have no record yet. In 8 bits "
    "on four GPUs vLLM generated slower than in bf16, by a build without DeepGEMM; with it, as in its own wheel, and 12 layers on one, as fast: there head, attention's scores and "
    "the draw are most of its steps, and stay in bf16.",
    "sync": "at most the card's own copies (`copy_limit_share` of it is used); many small tensors and turns between two processes are the rest. "
    "Planning is Python over a model's tensors, 18,867 of Qwen3-30B-A3B, and takes a quarter longer for 64 ranks than for 8 where `ep` spreads experts over "
    "all; that of before 2026-11-23 was of all ranks on each. One and two GPUs were measured on 2026-11-21, when each part was copied by a launch of its own; "
    "by a table that copies all at once four have a record, and eight have none.",
}
"""What limits a benchmark's cases today, or each of its kinds of cases; a benchmark with records needs one."""

GLANCE = (
    (
        "engine",
        "qwen2.5-1.5b/te",
        "tokens_per_s_per_gpu",
        "training, Qwen2.5-1.5B's shape, TransformerEngine",
        "megatron-core alone",
    ),
    (
        "engine",
        "qwen2.5-1.5b/portable",
        "tokens_per_s_per_gpu",
        "the same, portable layers",
        "megatron-core alone",
    ),
    (
        "engine",
        "qwen3-8b/te/gpus4/recompute-selective-mlp_act-layernorm/overlap_grad_reduce-true/overlap_param_gather-true",
        "tokens_per_s_per_gpu",
        "training, Qwen3-8B's shape, four GPUs, rows of 16,384 tokens",
        "megatron-core alone, its MLPs computed again",
    ),
    (
        "engine",
        "qwen3-30b-a3b/te/gpus4-ep4/overlap_grad_reduce-true/overlap_param_gather-true/by-layers12-24",
        "tokens_per_s_per_gpu",
        "training, Qwen3-30B-A3B's shape, four GPUs, by a line through 12 and 24 layers",
        "megatron-core alone",
    ),
    (
        "rollout",
        "qwen2.5-1.5b/1gpu/vllm",
        "tokens_per_second",
        "generation by vLLM, Qwen2.5-1.5B's shape, 512 samples of 512 tokens",
        "vLLM alone, its best options, on a host with other work",
    ),
    (
        "rollout",
        "qwen2.5-1.5b/1gpu/long-tail/vllm",
        "tokens_per_second",
        "the same, of long-tailed lengths",
        "vLLM alone, its best options, on a host with other work",
    ),
    (
        "sync",
        "qwen3-30b-a3b/4gpu",
        "seconds",
        "weights to the rollout, Qwen3-30B-A3B's shape, four GPUs",
        "one tensor after the other",
    ),
    ("step", "qwen2.5-1.5b/1gpu", "samples_per_s", "a GRPO step, Qwen2.5-1.5B's shape, one GPU", "TRL"),
    ("step", "qwen2.5-1.5b/4gpu", "samples_per_s", "the same, four GPUs", "TRL"),
    (
        "fp8",
        "8b/gpus1/by-layers4-8of36/tensorwise",
        "tokens_per_s",
        "training in 8 bits, Qwen3-8B's shape, by a line through 4 and 8 layers, a scale a tensor",
        "bf16",
    ),
    ("fp8", "8b/gpus1/by-layers4-8of36/blockwise", "tokens_per_s", "the same, a scale a block", "bf16"),
)
"""What stands first on the page: bench, case and metric of a record, what it is, and what its baseline is."""

TRIED = """## Tried, and left out

What was measured and did not help, so that nobody need try it again as it was; where it is told below stands in brackets.

- vLLM's first model runner, which vLLM takes by itself, launches a kernel a sequence where requests have seeds: less than half of the second's
  tokens/s (`rollout`, `bare-first`).
- Products of 128 experts in 8 bits: each expert is rounded and multiplied by launches of its own, 0.38 of bf16's tokens/s (`fp8`, `30b-a3b`);
  `quintet check` warns of it.
- A rollout in 8 bits without DeepGEMM generates slower than in bf16 (`step`, `4gpu/blockwise`).
- One launch for all experts makes them no five times as fast where each has 1,024 rows, but 1.56 times (`experts`).
- Rows of few sizes (`engine.row_buckets`): what they are padded by, 3% of tokens/s, is not gained back (`engine`, `ragged/row_buckets-true` beside
  `ragged`); a recipe may ask for them.
- Reduction of gradients and gathering of parameters beside computing, on two GPUs of a node: 30,511 tokens/s each, and 30,566 without (`engine`,
  `qwen3-8b/te/gpus2`). Between nodes it may gain; a recipe asks for it with `engine.overlap_grad_reduce` and `engine.overlap_param_gather`.
- A thread for each of the host's cores in every rank: packing waits for them (`engine`, of `qwen3-8b`).
"""


def page() -> str:
    """The page as Markdown: a section a benchmark, a table for each hardware, set of versions, commit and command."""
    records: list[dict[str, Any]] = [
        r for file in sorted(RESULTS.glob("*.json")) for r in json.loads(file.read_text())
    ]
    lines = [HEAD, *_at_a_glance(records), TRIED]
    for bench, of_bench in groupby(records, key=lambda r: r["bench"]):
        lines.append(f"## {bench}\n")
        limits = LIMITS[bench]
        if isinstance(limits, str):
            lines.append(f"Limited by: {limits}\n")
        else:
            lines += ["Limited by:\n", *(f"- {_of(case)}{limit}" for case, limit in limits.items()), ""]
        for origin, rows in groupby(of_bench, key=_origin):
            lines += ["| case | metric | value | baseline | ratio |", "|---|---|---|---|---|"]
            lines += [_row(r) for r in rows]
            lines.append(f"\n{origin}\n")
    return "\n".join(lines)


def _at_a_glance(records: list[dict[str, Any]]) -> list[str]:
    found = {(r["bench"], r["case"], r["metric"]): r for r in records}
    lines = ["## At a glance\n", "On H200s; the sections below have the commands, versions and dates.\n"]
    lines += ["| what | quintet | beside | | ratio |", "|---|---|---|---|---|"]
    for bench, case, metric, what, beside in GLANCE:
        one = found[bench, case, metric]
        assert one["hardware"].endswith("H200")
        value, baseline = one["value"], one["baseline"]
        better = baseline / value if one["unit"] == "s" else value / baseline
        lines.append(
            f"| {what} | {_number(value, one['unit'])} | {beside} | {_number(baseline, one['unit'])} | {better:.2f}× |"
        )
    return [*lines, ""]


def _of(case: str) -> str:
    return f"`{case}`: " if case else ""


def _origin(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"`{record['command']}` on {record['hardware']}, {record['date']}, commit {record['commit']}; {versions}."


def _row(record: dict[str, Any]) -> str:
    value, baseline = record["value"], record["baseline"]
    ratio = f"{value / baseline:.3g}" if baseline else ""
    other = _number(baseline, record["unit"]) if baseline is not None else ""
    cells = (record["case"], record["metric"], _number(value, record["unit"]), other, ratio)
    return "| " + " | ".join(cells) + " |"


def _number(value: float, unit: str) -> str:
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return shown if unit == "fraction" else f"{shown} {unit}"


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
