"""One case of the laptop's or the step benchmark in TRL's GRPOTrainer, timed step by step; prints one JSON object.

Runs in an environment of its own (TRL and its dependencies, pinned in trl-constraints.txt) and imports nothing of quintet. The
defaults are TRL's fastest settings that we found on two CPU cores; benchmarks/README.md has what was tried. With --vllm it runs on
GPUs, one process each as `torchrun` starts them, in bf16, and generates in a vLLM that lives in the same process.

    python benchmarks/trl_baseline.py --model DIR --work WORK.json [--micro-batches 1] [--cache dynamic] ...
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))
from laptop_cases import reward


class ForcedLengths(LogitsProcessor):
    """Ends each sample at its length, counted in response tokens with the end-of-sequence token, and never before."""

    def __init__(self, lengths: list[int], prompt_tokens: int, eos: int):
        self.prompt_tokens, self.eos = prompt_tokens, eos
        self.ending: dict[int, torch.Tensor] = {}
        for last in set(lengths):
            rows = [row for row, length in enumerate(lengths) if length == last]
            self.ending[last - 1] = torch.tensor(rows)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.eos] = -torch.inf
        rows = self.ending.get(input_ids.shape[1] - self.prompt_tokens)
        if rows is not None:
            scores[rows] = -torch.inf
            scores[rows, self.eos] = 0.0
        return scores


class TimedTrainer(trl.GRPOTrainer):
    """GRPOTrainer that forces the response lengths of the work and notes how long each generation takes."""

    def __init__(self, *args: Any, lengths: list[list[int]], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lengths = [length for step in lengths for length in step]
        self.taken = 0
        self.generate_s: list[float] = []
        if self.use_vllm:
            engine = self.vllm_generation.llm
            self._plain_generate = engine.generate
            engine.generate = self._forced_by_vllm
        else:
            self._plain_generate = self.model.generate
            self.model.generate = self._forced_generate

    def _forced_by_vllm(self, prompts: list[Any], sampling_params: Any, **options: Any) -> list[Any]:
        """A response's length is its limit, and nothing else ends it."""
        each = []
        for length in self._next_lengths(len(prompts)):
            each.append(sampling_params.clone())
            each[-1].max_tokens, each[-1].ignore_eos = length, True
        return self._plain_generate(prompts, sampling_params=each, **options)

    def _next_lengths(self, rows: int) -> list[int]:
        """Lengths of the rows that this process generates now; each process has the next slice of the batch."""
        start = self.taken + self.accelerator.process_index * rows
        return self.lengths[start : start + rows]

    def _forced_generate(self, **inputs: Any) -> torch.Tensor:
        rows, prompt_tokens = inputs["input_ids"].shape
        eos = self.processing_class.eos_token_id
        forced = ForcedLengths(self._next_lengths(rows), prompt_tokens, eos)
        return self._plain_generate(**inputs, logits_processor=LogitsProcessorList([forced]))

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        self.generate_s.append(time.perf_counter() - started)
        if [len(one) for one in ids] != self._next_lengths(len(ids)):
            raise AssertionError("TRL's responses do not have the lengths of the work")
        self.taken += len(ids) * self.accelerator.num_processes
        return ids, logprobs


class StepClock(TrainerCallback):
    """Seconds from the end of one step to the end of the next: everything counts, data loading too."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.first_step_at = 0.0
        """Unix time."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.first_step_at = time.time()
        self.ends.append(time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
        print(
            f"step {len(self.ends) - 1}: {self.ends[-1] - self.ends[-2]:.2f} s", file=sys.stderr, flush=True
        )


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [reward("", response) for response in completions]


def config(args: argparse.Namespace, work: dict[str, Any], output_dir: str) -> trl.GRPOConfig:
    """The same algorithm as quintet's side: GRPO, clip-higher, token mean, no KL, one optimizer step a generation."""
    samples = len(work["lengths"][0])
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = {}
    if args.vllm:
        on_gpu = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": args.memory_fraction,
            "vllm_max_model_length": args.prompt_tokens + work["longest"],
            "vllm_enable_sleep_mode": False,  # all fits: the fastest
            "vllm_importance_sampling_correction": False,
        }
    return trl.GRPOConfig(
        output_dir=output_dir,
        max_steps=work["warmup_steps"] + work["steps"],
        per_device_train_batch_size=samples // args.micro_batches // processes,
        gradient_accumulation_steps=args.micro_batches,
        steps_per_generation=args.micro_batches // args.generations,
        num_generations=work["samples_per_prompt"],
        max_completion_length=work["longest"],
        cache_implementation=None if args.cache == "dynamic" else args.cache,
        beta=0.0,
        num_iterations=1,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        temperature=1.0,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim=args.optim,
        use_cpu=not args.vllm,
        bf16=args.vllm,
        gradient_checkpointing=args.recompute,
        **on_gpu,
        disable_dropout=True,
        shuffle_dataset=False,
        ddp_backend="gloo" if processes > 1 and not args.vllm else None,
        ddp_find_unused_parameters=False if processes > 1 else None,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )


def run(args: argparse.Namespace, work: dict[str, Any]) -> dict[str, Any]:
    """Train for the work's steps; return seconds by step (warm-up left out) and their summary."""
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        trust_remote_code=False,
        dtype=torch.bfloat16 if args.vllm else torch.float32,
        attn_implementation=args.attention,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False, padding_side="left")
    clock = StepClock()
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = TimedTrainer(
            model=model,
            reward_funcs=share_of_digits,
            args=config(args, work, output_dir),
            train_dataset=Dataset.from_dict({"prompt": work["prompts"]}),
            processing_class=tokenizer,
            callbacks=[clock],
            lengths=work["lengths"],
        )
        trainer.train()
    skip = work["warmup_steps"]
    step_s = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)][skip:]
    calls = trainer.generate_s
    generate_s = [sum(calls[i : i + args.generations]) for i in range(0, len(calls), args.generations)][skip:]
    samples = len(work["lengths"][0])
    return {
        "case": work["case"],
        "step_s": step_s,
        "first_step_at": clock.first_step_at,
        "step_s_median": statistics.median(step_s),
        "step_s_min": min(step_s),
        "step_s_max": max(step_s),
        "generate_s_median": statistics.median(generate_s),
        "train_s_median": statistics.median(step - gen for step, gen in zip(step_s, generate_s, strict=True)),
        "samples_per_s": samples / statistics.median(step_s),
        "response_tokens_per_step": sum(map(sum, work["lengths"][skip:])) / len(step_s),
        "settings": {key: value for key, value in vars(args).items() if key not in ("model", "work")},
        "versions": {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument(
        "--work", type=Path, required=True, help="JSON file: prompts, lengths by step, counts"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1, help="backward passes a step")
    parser.add_argument(
        "--generations", type=int, default=1, help="calls of generate a step; divides --micro-batches"
    )
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument(
        "--cache", choices=["dynamic", "static"], default="dynamic", help="transformers' KV cache"
    )
    parser.add_argument("--optim", default="adamw_torch_fused")
    parser.add_argument("--vllm", action="store_true", help="on GPUs, generated by vLLM")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--memory-fraction", type=float, default=0.3, help="of the GPU, for vLLM")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="longest prompt, for vLLM")
    args = parser.parse_args()
    result = run(args, json.loads(args.work.read_text()))
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
