"""Parameters and FLOPs of a shape are those of transformers' model."""

from __future__ import annotations

import math

import pytest
import torch

from quintet.models import family_of
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
    table = family_of({"architectures": [type(model).__name__]}).weights(shape)
    held = sum(math.prod(s) for w in table for s in w.shapes if w.trained)
    assert held == shape.parameter_count


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
