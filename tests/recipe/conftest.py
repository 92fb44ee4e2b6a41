"""Recipes written to files, and the text of the error they give."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quintet.errors import UserError
from quintet.recipe import Recipe, load_recipe
from tests.models.directory import QWEN3, write_model

VALID = """\
model:
  build:
    layers: 4
data:
  task: addition
"""

QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
DEEPSEEK = QWEN3 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
MODELS = {"dense": QWEN3, "moe": QWEN3_MOE, "mla": DEEPSEEK}

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
