"""Two small runs whose first steps are written down beside this file: a dense model on dp 2, experts on tp 2.

python -m tests.golden            # write the files anew: after a change that is meant to change the losses
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from quintet.cli import main
from quintet.data.prompts import alphabet_of
from quintet.data.tokenizer import build_char_tokenizer
from quintet.recipe.schema import Data
from quintet.runs.ledger import CLOCK_KEYS, read_metrics

ROOT = Path(__file__).parents[2]
STEPS = 5
WRITTEN = ("loss", "grad_norm", "reward/mean", "response_tokens/mean")
RECIPE = [
    "recipes/laptop_demo.yaml",
    *(f"train.steps={STEPS}", "train.prompts_per_step=8", "train.eval_prompts=0", "optimizer.warmup_steps=1"),
    *("sft.steps=5", "sft.samples_per_step=16", "sft.optimizer.warmup_steps=1", "sft.stop_at_loss=null"),
    *("optimizer.lr=1.0e-4", "sft.optimizer.lr=1.0e-4", "rollout.samples_per_prompt=4"),
    # Worth something from the first step on: a right answer is not to be hoped for.
    *("reward.function=length", "optimizer.eps=1.0e-4", "sft.optimizer.eps=1.0e-4"),
]
CASES = {
    "dense-dp2": ["model.build.layers=2", "model.build.hidden_size=64"],
    "experts-tp2": ["model.build=null", "layout.tp=2", "layout.sp=true", "layout.ep=2", "layout.etp=1"],
}
"""What each adds to the recipe; of the second, the model's directory as well."""


def lines_of(case: str, directory: Path) -> list[dict[str, Any]]:
    """Run a case below a directory; what its ledger says of each step, without what the clock decides."""
    asked = [*RECIPE, *CASES[case], f"run.dir={directory / 'runs'}", f"run.name={case}"]
    if "model.build=null" in asked:
        asked.append(f"model.path={_experts(directory / 'model')}")
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        assert main(["train", str(ROOT / asked[0]), *asked[1:]]) == 0
    (run,) = sorted((directory / "runs").iterdir())[-1:]
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK_KEYS)} for line in lines]


def _experts(path: Path) -> Path:
    """A Qwen3-MoE of two layers and four experts, with the tokenizer of the recipe's task."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    if (path / "config.json").exists():
        return path
    tokenizer = build_char_tokenizer(alphabet_of(Data(task="addition", task_options=_TASK)), path)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    special = {"eos_token_id": tokenizer.eos_token_id}
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), **sizes, **heads, **experts, **special)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).float().save_pretrained(path)
    return path


_TASK = {"digits": 3, "min_digits": 3, "scratchpad": 1}


def file_of(case: str) -> Path:
    return Path(__file__).parent / f"{case}.json"


def written(case: str) -> list[dict[str, Any]]:
    """The steps as they were written down."""
    return list(json.loads(file_of(case).read_text(encoding="utf-8"))["steps"])


def write(case: str, lines: list[dict[str, Any]]) -> None:
    steps = [{key: line[key] for key in ("stage", "step", *WRITTEN) if key in line} for line in lines]
    versions = {name: version(name) for name in ("torch", "megatron-core", "transformers")}
    text = json.dumps({"recipe": [*RECIPE, *CASES[case]], "versions": versions, "steps": steps}, indent=1)
    file_of(case).write_text(text + "\n", encoding="utf-8")
