"""Recipes of models that fit no test machine, over directories of their whole size: `quintet check` finds nothing to put right."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from quintet.cli import main
from quintet.models import read_shape, table_of
from quintet.recipe.hub import SHAPES
from tests.models.directory import write_tokenizer, write_weights

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
PER_FILE = 3000


def write_giant(name: str, path: Path) -> Path:
    """The config that came with quintet, all weights as published by name and shape, of zeros in sparse files, and a tokenizer."""
    path.mkdir()
    shutil.copy(SHAPES / name / "config.json", path)
    tensors = [one for weight in table_of(read_shape(path)) for one in weight.tensors]
    files = {}
    for first in range(0, len(tensors), PER_FILE):
        file, some = f"model-{first:05}.safetensors", tensors[first : first + PER_FILE]
        write_weights(path / file, dict(some))
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
    model, data = write_giant(name, tmp_path / name), tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "What is {n} + 1?", "answer": "{n + 1}"}}\n' for n in range(1000)))
    where = [f"model.path={model}", f"data.train_path={data}", f"data.eval_path={data}"]
    code, (_, printed) = main(["check", str(RECIPES / f"{recipe}.yaml"), *where]), capsys.readouterr()
    assert code == 0, printed
    assert f"{recipe}.yaml is a sound recipe for quintet train." in printed
    assert said in re.sub(r"\s+", " ", printed)
