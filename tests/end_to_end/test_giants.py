"""Recipes of models that fit no test machine: over directories of their whole size `quintet check` finds nothing to put right, and over
tiny models of the same families they train."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.cli import main
from quintet.data.tokenizer import build_char_tokenizer
from quintet.models import read_shape, table_of
from quintet.models.fp8_blocks import DTYPE, SCALE, scales_shape
from quintet.recipe.hub import SHAPES
from tests.end_to_end.test_train import metrics, run, run_directory
from tests.models.directory import write_tokenizer, write_weights
from tests.oracle.ahead import save_with_layers
from tests.oracle.models import save

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
PER_FILE = 3000
IN_8_BITS = ("_proj.weight", "_with_mqa.weight")


QUANTIZED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def write_giant(name: str, path: Path, eight: bool = False) -> Path:
    """The config that came with quintet, all weights as published by name and shape, of zeros in sparse files, and a tokenizer.
    eight: in 8 bits with scales of blocks, and copies of tensors beside them."""
    path.mkdir()
    config = json.loads((SHAPES / name / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | ({"quantization_config": QUANTIZED} if eight else {}))
    )
    table = table_of(read_shape(path))
    tensors = [one for weight in table for one in weight.tensors]
    others = {}
    if eight:
        tensors += [(copy, weight.shapes[0]) for weight in table for copy in weight.copies]
        in_8 = [one for one in tensors if one[0].endswith(IN_8_BITS) and "eh_proj" not in one[0]]
        others = {name: DTYPE for name, _ in in_8} | {name + SCALE: "F32" for name, _ in in_8}
        tensors += [(name + SCALE, scales_shape(shape)) for name, shape in in_8]
    files = {}
    for first in range(0, len(tensors), PER_FILE):
        file, some = f"model-{first:05}.safetensors", tensors[first : first + PER_FILE]
        write_weights(path / file, dict(some), others=others)
        files |= {name: file for name, _ in some}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    write_tokenizer(path)
    return path


@pytest.mark.parametrize(
    ("recipe", "name", "said"),
    [
        ("deepseek_v3_96_h20", "DeepSeek-V3", "tp 8 with sp × pp 12 of 6 + 9 × 5 + 6 + 4 layers"),
        ("qwen3_235b_a22b_32_h20", "Qwen3-235B-A22B", "tp 4 with sp × pp 8 of 11 + 6 × 12 + 11 layers"),
        ("qwen2_7b_8_h20", "Qwen2-7B", "dp 4 × tp 2 with sp × pp 1"),
        ("mimo_7b_mtp_8gpu", "MiMo-7B-SFT", "Its layer for multi-token prediction"),
    ],
)
def test_a_recipe_of_a_giant_is_sound(tmp_path, capsys, recipe: str, name: str, said: str) -> None:
    where = paths(write_giant(name, tmp_path / name), tmp_path)
    code, (_, printed) = main(["check", str(RECIPES / f"{recipe}.yaml"), *where]), capsys.readouterr()
    assert code == 0, printed
    assert f"{recipe}.yaml is a sound recipe for quintet train." in printed
    assert said in re.sub(r"\s+", " ", printed)


def paths(model: Path, where: Path) -> list[str]:
    """Overrides of a model and of data that are written there."""
    data = where / "data.jsonl"
    data.write_text(
        "".join(f'{{"prompt": "What is {n} mod 10?", "answer": "{n % 10}"}}\n' for n in range(1000))
    )
    return [f"model.path={model}", f"data.train_path={data}", f"data.eval_path={data}"]


ON_A_LAPTOP = [
    *("cluster.device=cpu", "cluster.ranks=4", "cluster.ranks_per_node=4", "optimizer.cpu_fraction=0"),
    *("rollout.backend=native", "rollout.memory_fraction=0.5", "rollout.max_response_tokens=16"),
    *("train.steps=1", "train.prompts_per_step=24", "train.eval_prompts=2"),
]
"""Of a recipe of a giant: where it runs, what is not of the native rollout, and how much. All else is as its file has it."""
EXPERTS = ["layout.tp=2", "layout.pp=2", "layout.ep=2", "rollout.layout.tp=4"]


@pytest.mark.parametrize(
    ("recipe", "family", "own"),
    [
        ("deepseek_v3_96_h20", "deepseek_v3", [*EXPERTS, "layout.stage_layers=[3, 1]"]),
        ("qwen2_7b_8_h20", "qwen2", []),
        pytest.param(
            *("qwen3_235b_a22b_32_h20", "qwen3_moe", [*EXPERTS, "layout.stage_layers=[1, 3]"]),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("mimo_7b_mtp_8gpu", "mimo", ["rollout.draft_tokens=0", "reward.overlong_tokens=8"]),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_recipe_of_a_giant_trains_a_tiny_model(tmp_path, recipe: str, family: str, own: list[str]) -> None:
    """One step, of which some samples are rewarded."""
    path = tmp_path / family
    if "mtp" in recipe:
        save_with_layers(family, 1, path)
    else:
        save(family, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 15}))
    build_char_tokenizer("0123456789 What is mod?", path)
    where = [*paths(path, tmp_path), f"run.dir={tmp_path / 'runs'}"]
    directory = run_directory(run("train", str(RECIPES / f"{recipe}.yaml"), *where, *ON_A_LAPTOP, *own))
    assert json.loads((directory / "summary.json").read_text())["status"] == "finished"
    (step,) = (line for line in metrics(directory, "rl") if "loss" in line)
    assert step["grad_norm"] > 0
    assert ("mtp/loss_1" in step) is ("mtp" in recipe)


def test_the_largest_is_looked_through_as_it_was_published(tmp_path) -> None:
    """In 8 bits, 92,000 tensors with their scales and copies, by a process of its own, imports and all: within the time limit, also where
    layers for multi-token prediction are trained, which are asked for again and again."""
    where = paths(write_giant("DeepSeek-V3", tmp_path / "DeepSeek-V3", eight=True), tmp_path)
    check = [sys.executable, "-m", "quintet", "check", str(RECIPES / "deepseek_v3_96_h20.yaml"), *where]
    for mtp in ("null", "{}"):
        done = subprocess.run([*check, f"mtp={mtp}"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Memory: about" in done.stderr
        assert "Not looked through" not in done.stderr
