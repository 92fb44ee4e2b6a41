"""The example of a family from outside the package: it computes what it should, and trains in every process of a run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet.models import read_shape
from quintet.recipe.user_family import use_family

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_model"
FAMILY = f"{EXAMPLE / 'exaone.py'}:Exaone"
PROMPT, TOKENS = [4, 7, 13, 5], 6
LLAMA = {
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "transformer.h.": "model.layers.",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.attention": "self_attn",
    "out_proj": "o_proj",
    "c_fc_0": "gate_proj",
    "c_fc_1": "up_proj",
    "c_proj": "down_proj",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("custom") / "tiny-exaone"
    subprocess.run([sys.executable, str(EXAMPLE / "make_checkpoint.py"), str(path)], check=True, cwd=ROOT)
    return path


def as_llama(path: Path) -> Any:
    """The same weights as transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    data = json.loads((path / "config.json").read_text())
    usual = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}
    config = {usual.get(key, key): value for key, value in data.items() if key != "architectures"}
    made = LlamaForCausalLM(LlamaConfig(**config | {"hidden_act": "silu"}))
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        for theirs, usual_name in LLAMA.items():
            name = name.replace(theirs, usual_name)
        tensors[name] = tensor
    assert made.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    made.tie_weights()
    return made


def generate_and_save(path: Path, out: Path, layout: dict[str, Any]) -> list[int]:
    """On one rank: greedy tokens, and the weights written again."""
    from quintet.engine.engine import Engine
    from quintet.recipe import schema
    from quintet.rollout.base import Request, Sampling
    from quintet.rollout.native.rollout import NativeRollout

    use_family(FAMILY)
    engine = Engine(
        read_shape(path), schema.Layout(**layout), engine=schema.Engine(), optimizer=None, dtype="fp32"
    )
    engine.load_hf(path)
    engine.save_hf(out, path)
    rollout = NativeRollout(engine.model, engine.mesh, slots=4, decode=str, update=lambda: 0)
    sampling = Sampling(temperature=0, max_response_tokens=TOKENS)
    return rollout.generate([Request(PROMPT)], sampling)[0][0].response_ids


@pytest.mark.slow
def test_it_computes_what_a_llama_computes(pool, checkpoint, tmp_path):
    made, ids = as_llama(checkpoint), list(PROMPT)
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(made(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    for found in pool.run(generate_and_save, 2, checkpoint, tmp_path / "out", {"tp": 2}):
        assert found == ids[len(PROMPT) :]
    before, after = (load_file(one / "model.safetensors") for one in (checkpoint, tmp_path / "out"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def run(*arguments: str, where: Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.nightly
def test_the_commands_of_its_readme_train_it(tmp_path):
    """From another working directory: every rank finds the file."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (block,) = re.findall(r"```sh\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    make, check, train = (shlex.split(line, comments=True) for line in block.splitlines())
    run(*make[1:], where=tmp_path)
    assert "Model: exaone, 75.1K parameters" in run("-m", *check, where=tmp_path)
    steps = ["sft.steps=3", "train.steps=1", "train.eval_prompts=4", "train.prompts_per_step=4"]
    output = run("-m", *train, *steps, "sft.optimizer.warmup_steps=1", where=tmp_path)
    found = re.search(r"^run directory\s+(\S+)$", output, re.MULTILINE)
    assert found, output
    saved = tmp_path / found[1] / "checkpoint"
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "tiny-exaone", saved))
    assert set(before) == set(after)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    again = ["generate", train[2], f"model.path={saved}", "rollout.samples_per_prompt=1"]
    again += ["cluster.ranks=1", "layout.tp=1", "--prompt", "1+2="]
    assert '"response"' in run("-m", "quintet", *again, where=tmp_path)
