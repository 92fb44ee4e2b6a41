"""Recipes written to files, and the text of the error they give."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quintet.errors import UserError
from quintet.recipe.loader import load_recipe
from quintet.recipe.schema import Recipe
from tests.models.directory import DEEPSEEK_V3, GPT_OSS, QWEN3, QWEN3_MOE, write_model

VALID = """\
model:
  build:
    layers: 4
data:
  task: addition
"""

_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MODELS = {
    "dense": QWEN3,
    "moe": QWEN3_MOE,
    "mla": DEEPSEEK_V3,
    "qwen2-wide": QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 16},
    "sinks": GPT_OSS,
    "sinks-limit": GPT_OSS | {"swiglu_limit": 5.0},
    "fp8": QWEN3 | _FP8 | {"hidden_size": 128, "head_dim": 128, "intermediate_size": 128},
}

Load = Callable[..., Recipe]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Overrides that name a model of each kind: Hugging Face directories as far as the rules look."""
    found = {}
    for name, config in MODELS.items():
        directory = write_model(tmp_path_factory.mktemp(name) / name, config)
        (directory / "tokenizer.json").touch()
        found[name] = ["model.build=null", f"model.path={directory}"]
    return found


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a recipe from text (a valid one by default) with overrides."""

    def load(*overrides: str, text: str = VALID, command: str = "train") -> Recipe:
        file = tmp_path / "r.yaml"
        file.write_text(text)
        return load_recipe(file, overrides, command=command)

    return load


@pytest.fixture
def refuse(load: Load) -> Callable[..., str]:
    """The message with which a recipe is refused."""

    def refuse(*overrides: str, **options: str) -> str:
        with pytest.raises(UserError) as caught:
            load(*overrides, **options)
        return str(caught.value)

    return refuse
