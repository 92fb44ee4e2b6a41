"""Hugging Face directories for tests that look at config.json and headers only: real headers, no data on disk."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quintet.models import family_of
from quintet.models.safetensors_header import DTYPES

EMPTY: Mapping[str, str] = MappingProxyType({})

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

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
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V3 = QWEN3 | {
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


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a model and their shapes."""
    family = family_of(config)
    return {
        name: shape for weight in family.weights(family.shape_of(config)) for name, shape in weight.tensors
    }


def write_weights(
    file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16", others: Mapping[str, str] = EMPTY
) -> None:
    """A safetensors file of zeros, sparse where the file system can. others: types of tensors that are not of `dtype`."""
    header, end = {}, 0
    for name, shape in shapes.items():
        of = others.get(name, dtype)
        begin, end = end, end + DTYPES.get(of, 2) * math.prod(shape)
        header[name] = {"dtype": of, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + end)


def write_tokenizer(path: Path) -> None:
    """Write a character tokenizer of printable ASCII, with its chat template."""
    from quintet.data.tokenizer import build_char_tokenizer

    build_char_tokenizer(string.printable, path)


def write_model(path: Path, config: dict[str, Any] = QWEN3) -> Path:
    """config.json and model.safetensors of a model."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    write_weights(path / "model.safetensors", shapes_of(config))
    return path
