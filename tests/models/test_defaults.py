"""A config.json that lacks a key means what transformers' class of the family takes for it, or is refused; never anything else."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from quintet.errors import UserError
from quintet.models import ModelShape, family_of
from quintet.models.hf_config import HfConfig

CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
    "Glm4MoeForCausalLM": "Glm4MoeConfig",
    "GptOssForCausalLM": "GptOssConfig",
    "MiMoForCausalLM": "Qwen2Config",  # whose class, which comes with the model, is Qwen2's
}
NOT_TAKEN = {"num_nextn_predict_layers", "num_mtp_layers"}
"""transformers' models have no layers for multi-token prediction, whatever its classes say of them."""
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 5e5},
    {"rope_scaling": None},
    {"rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e5},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 5e5},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
]


def _whole(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """A config with all that transformers' class fills in."""
    import transformers

    made = getattr(transformers, CLASSES[architecture])(**deepcopy(config))
    return {**made.to_dict(), "architectures": [architecture]}


def _shape(config: dict[str, Any]) -> ModelShape | None:
    """None where it is refused."""
    try:
        return family_of(config).shape_of(config)
    except UserError:
        return None


def _complete(architecture: str) -> dict[str, Any]:
    return _whole(architecture, {"head_dim": 128} if architecture == "Glm4MoeForCausalLM" else {})


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_key_that_is_missing(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, read = _complete(architecture), set()
    own = HfConfig._own
    monkeypatch.setattr(HfConfig, "_own", lambda self, key: read.add(key) or own(self, key))
    assert _shape(config) is not None
    keys = read & config.keys() - NOT_TAKEN - {"architectures"}
    assert len(keys) > 12
    wrong = {}
    for key in sorted(keys):
        without = {name: value for name, value in config.items() if name != key}
        found, expected = _shape(without), _shape(_whole(architecture, without))
        if found not in (None, expected):
            wrong[key] = (found, expected)
    assert not wrong


@pytest.mark.parametrize("architecture", CLASSES)
def test_rotary_parameters_in_part(architecture: str) -> None:
    config = _complete(architecture)
    for key in ("rope_parameters", "rope_theta", "partial_rotary_factor"):
        config.pop(key, None)
    for rope in ROPES:
        found = _shape(config | deepcopy(rope))
        assert found in (None, _shape(_whole(architecture, config | rope))), rope


def test_defaults_that_no_other_family_has() -> None:
    deepseek = _complete("DeepseekV3ForCausalLM")
    for key in ("n_group", "topk_group", "routed_scaling_factor", "q_lora_rank"):
        del deepseek[key]
    shape = _shape(deepseek)
    assert shape
    assert shape.moe
    assert shape.mla
    assert (shape.moe.groups, shape.moe.group_top_k, shape.moe.scaling_factor) == (8, 4, 2.5)
    assert shape.mla.q_lora_rank == 1536
    none = _shape(deepseek | {"q_lora_rank": None})
    assert none
    assert none.mla
    assert none.mla.q_lora_rank is None
    mixtral = _complete("MixtralForCausalLM")
    del mixtral["rope_parameters"]
    found = _shape(mixtral)
    assert found
    assert found.rope.theta == 1e6
