"""Parameters and FLOPs of a shape are those of transformers' model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from quintet.models import family_of, read_shape, trained_shape
from tests.engine import moe_models
from tests.oracle.reference import CONFIGS


def made(name: str):
    """transformers' model without its memory, and our shape of it."""
    from transformers import AutoModelForCausalLM

    config = CONFIGS[name] if name in CONFIGS else moe_models.config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    data = {**config.to_dict(), "architectures": [type(model).__name__]}
    return model, family_of(data).shape_of(data).without_mtp()


ALL = [*CONFIGS, *moe_models.FAMILIES]


@pytest.mark.parametrize("name", ALL)
def test_parameters(name):
    model, shape = made(name)
    assert shape.parameter_count == sum(p.numel() for p in model.parameters())


def test_layers_with_experts_and_what_is_trained(tmp_path):
    """Layers keep their numbers in the whole model; one for multi-token prediction has experts, and is not trained."""
    sizes = {"num_hidden_layers": 5, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    config = _GLM | {"first_k_dense_replace": 2} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole, trained = read_shape(tmp_path), trained_shape(tmp_path)
    assert (whole.mtp_layers, trained.mtp_layers) == (1, 0)
    assert whole.moe_layers == trained.moe_layers == (2, 3, 4)
    assert replace(trained, moe=None).moe_layers == ()


_GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "num_hidden_layers": 46,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "vocab_size": 151552,
}
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "vocab_size": 32000,
}
_MIMO = {
    "architectures": ["MiMoForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151680,
}


@pytest.mark.parametrize(
    ("config", "billions"),
    [(_GLM, 109.2), (_MIXTRAL, 46.7), (_MIMO, 7.8)],
    ids=["GLM-4.5-Air", "Mixtral-8x7B", "MiMo-7B"],
)
def test_published_models_have_their_published_sizes(config, billions):
    """With their layers for multi-token prediction; the hub counts embedding and head of GLM a second time, 1.2B more."""
    data = config | {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768}
    shape = family_of(data).shape_of(data)
    assert round(shape.parameter_count / 1e9, 1) == billions


@pytest.mark.parametrize("name", ALL)
def test_flops_count_what_one_token_multiplies(name):
    """Against torch's own count of matrix products, less attention's (context 0), forwards (a third of training)."""
    from torch.utils.flop_counter import FlopCounterMode

    model, shape = made(name)
    model = model.to_empty(device="cpu")
    tokens = 16
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64))
    counts = counter.get_flop_counts()["Global"]
    counted = sum(n for op, n in counts.items() if "attention" not in str(op)) / tokens
    norms = shape.flops_per_token(0.0) / 3 - counted
    assert 0 <= norms < 0.015 * counted
    per_key = (shape.flops_per_token(1.0) - shape.flops_per_token(0.0)) / 3
    assert per_key == 2 * shape.layers * shape.heads * (shape.head_dim + shape.v_head_dim)


def test_active_parameters_are_those_of_the_chosen_experts():
    _, shape = made("qwen3_moe")
    idle = shape.layers * (8 - 2) * 3 * 64 * 32
    assert shape.active_parameter_count == shape.parameter_count - idle
    _, dense = made("qwen3")
    assert dense.active_parameter_count == dense.parameter_count
