"""A model from nothing: a Qwen3-shaped Hugging Face directory with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quintet.models import family_of
from quintet.recipe.schema import BuildModel

INITIAL_STD = 0.02


def write_fresh_model(
    build: BuildModel, path: Path, *, vocab_size: int, eos_id: int, pad_id: int, seed: int
) -> None:
    """Write config.json and model.safetensors (fp32): matrices normal with std 0.02, norms 1."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": build.hidden_size,
        "intermediate_size": build.ffn_hidden_size,
        "num_hidden_layers": build.layers,
        "num_attention_heads": build.heads,
        "num_key_value_heads": build.kv_heads,
        "head_dim": build.head_dim,
        "max_position_embeddings": build.max_position_embeddings,
        "tie_word_embeddings": build.tied_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    family = family_of(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for weight in family.weights(family.shape_of(config)):
        for name, shape in weight.tensors:
            ones = len(shape) == 1
            tensors[name] = (
                torch.ones(shape) if ones else torch.empty(shape).normal_(0, INITIAL_STD, generator=generator)
            )
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
