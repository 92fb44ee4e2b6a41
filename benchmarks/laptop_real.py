"""Generation and training of a real model on a laptop's cores, beside transformers on as many threads, in the same run.

    python -m benchmarks.laptop_real --model SmolLM2-135M-Instruct

A step is 2 prompts × 4 samples, every response of `--tokens` tokens, and one optimizer step of all weights on them, in fp32. quintet runs as in
a run: ranks of one thread, one a core, and the outer loop's own verbs (benchmarks/laptop_quintet.py); what is not generating
counts as training, rewards and the hand-over of samples with it. transformers is one process with a thread a core: `generate` on the batch, then
forward, backward and AdamW on it. The sides take turns, each in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.laptop_cases import Case
from benchmarks.options import positive_int
from benchmarks.records import RESULTS, merged, record, write_records

FILE = RESULTS / "laptop_real.json"
PROMPTS = (
    "Question: Natalia sold clips to 48 friends in April, and then she sold half as many clips in May. How many in all?\nAnswer:",
    "Question: Weng earns $12 an hour. Yesterday, she worked for 50 minutes. How much did she earn?\nAnswer:",
)


@dataclass(frozen=True)
class RealCase(Case):
    """The same prompts each step, every response as long as the longest."""

    samples_per_prompt: int = 4

    def prompts(self) -> list[str]:
        return list(PROMPTS) * (self.warmup_steps + self.steps)

    def lengths(self) -> list[list[int]]:
        samples = len(PROMPTS) * self.samples_per_prompt
        return [[self.longest] * samples for _ in range(self.warmup_steps + self.steps)]


def run_transformers(case: Case, model: Path, cores: int) -> dict[str, Any]:
    """One run of the case in transformers, in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(cores)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", trust_remote_code=False)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, fused=True)
    texts = [text for text in PROMPTS for _ in range(case.samples_per_prompt)]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    length, found = batch["input_ids"].shape[1], []
    how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    for _ in range(case.warmup_steps + case.steps):
        began = time.perf_counter()
        with torch.no_grad():
            policy.eval()
            ids = policy.generate(**batch, **how, max_new_tokens=case.longest, min_new_tokens=case.longest)
        generated = time.perf_counter()
        policy.train()
        mask = torch.cat((batch["attention_mask"], torch.ones_like(ids[:, length:])), 1)
        logits = policy(ids, attention_mask=mask, logits_to_keep=case.longest + 1).logits[:, :-1]
        wanted = ids[:, length:]
        log_probs = -torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), reduction="none"
        )
        advantages = torch.linspace(-1, 1, len(ids)).repeat_interleave(case.longest)
        ratio = (log_probs - log_probs.detach()).exp()
        (-(ratio * advantages).mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((generated - began, time.perf_counter() - generated))
    generate_s, train_s = zip(*found[case.warmup_steps :], strict=True)
    return {"generate_s_median": statistics.median(generate_s), "train_s_median": statistics.median(train_s)}


def run_side(side: str, case: Case, model: Path, cores: int) -> dict[str, Any]:
    """One run of the case on one side."""
    if side == "quintet":
        from benchmarks.laptop_quintet import run_quintet

        return run_quintet(case, model, cores)
    return run_transformers(case, model, cores)


def in_a_process(side: str, args: argparse.Namespace) -> dict[str, Any]:
    """The same, in a process that is gone afterwards."""
    threads = str(1 if side == "quintet" else args.cores)
    command = [sys.executable, "-m", "benchmarks.laptop_real", "--side", side, "--model", str(args.model)]
    command += ["--tokens", str(args.tokens), "--cores", str(args.cores), "--steps", str(args.steps)]
    environment = os.environ | {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rates(result: dict[str, Any], case: Case, prompt_tokens: int) -> dict[str, float]:
    """Tokens a second: those that were generated, and all that were trained on, prompts among them."""
    generated = sum(case.lengths()[0])
    trained = generated + prompt_tokens
    return {
        "generate_tokens_per_s": generated / result["generate_s_median"],
        "train_tokens_per_s": trained / result["train_s_median"],
    }


def measure(args: argparse.Namespace, case: Case) -> list[dict[str, Any]]:
    """Run the sides in turns, print them, and return the records."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    prompt_tokens = sum(len(tokenizer(text)["input_ids"]) for text in PROMPTS) * case.samples_per_prompt
    found: dict[str, list[dict[str, float]]] = {"transformers": [], "quintet": []}
    for _ in range(args.rounds):
        for side, runs in found.items():
            runs.append(rates(in_a_process(side, args), case, prompt_tokens))
            print(side, *(f"{name} {value:.1f}" for name, value in runs[-1].items()), flush=True)
    medians = {
        side: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for side, runs in found.items()
    }
    name = f"smollm2-135m/{args.cores} cores"
    ours, theirs = medians["quintet"], medians["transformers"]
    return [
        record("laptop_real", name, metric, ours[metric], "tokens/s", baseline=theirs[metric])
        | {
            "command": f"python -m benchmarks.laptop_real --model SmolLM2-135M-Instruct --tokens {args.tokens}"
        }
        for metric in ours
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="directory (tools/smollm2.py makes one)")
    parser.add_argument("--tokens", type=positive_int, default=160, help="of each response (default 160)")
    parser.add_argument(
        "--steps", type=positive_int, default=2, help="measured, after one that is not (default 2)"
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=1, help="how often the sides take turns (default 1)"
    )
    parser.add_argument(
        "--cores", type=positive_int, default=os.cpu_count(), help="for either side (default: all)"
    )
    parser.add_argument("--side", choices=["quintet", "transformers"], help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="print, and write no records")
    args = parser.parse_args()
    case = RealCase("real", args.tokens, args.tokens, log_normal=False, warmup_steps=1, steps=args.steps)
    if args.side:
        print(json.dumps(run_side(args.side, case, args.model, args.cores), default=str))
        return
    records = measure(args, case)
    for one in records:
        print(f"{one['metric']}: {one['value']:.1f}, {one['value'] / one['baseline']:.2f}x of transformers")
    if not args.dry_run:
        write_records(FILE, merged(FILE, records))


if __name__ == "__main__":
    main()
