"""Models from nothing: a small Hugging Face directory with random weights, or one with new layers for multi-token prediction."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quintet.engine.weights.hf_read import TORCH_DTYPES
from quintet.models import Weight, family_of, read_shape
from quintet.models.dense import MTP_KEYS
from quintet.models.hf_config import read_json
from quintet.models.weights_on_disk import INDEX, WeightsOnDisk, find_weights, mtp_weights
from quintet.recipe.schema import BuildModel

INITIAL_STD = 0.02
_KNOWN_AS = {
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "mimo": ("MiMoForCausalLM", "qwen2"),  # transformers knows a MiMo as its trunk
}
"""Architecture and model type in config.json, by family."""


def write_fresh_model(
    build: BuildModel,
    path: Path,
    *,
    vocab_size: int,
    eos_id: int,
    pad_id: int,
    seed: int,
    mtp_layers: int | None = None,
) -> None:
    """Write config.json and model.safetensors (fp32): matrices normal with std 0.02, norms 1, biases 0. mtp_layers: for
    multi-token prediction, of a family that has them."""
    architecture, model_type = _KNOWN_AS[build.family]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
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
        "attention_bias": build.family == "mimo",
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "dtype": "float32",
    } | ({MTP_KEYS[0]: mtp_layers} if mtp_layers else {})
    if build.moe is not None:
        config |= {
            "num_experts": build.moe.experts,
            "num_experts_per_tok": build.moe.top_k,
            "moe_intermediate_size": build.moe.ffn_hidden_size,
            "norm_topk_prob": True,
        }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    family = family_of(config)
    tensors = _fresh(family.weights(family.shape_of(config)), torch.float32, seed)
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})


def write_with_fresh_layers(source: Path, path: Path, mtp_layers: int, seed: int) -> None:
    """Write the model of another directory with new layers for multi-token prediction: they, config.json and the index are
    written, all other files are links to the source's. Layers have the type that config.json names, or most of the source's weights.

    Raises UserError when the source's weights cannot be read.
    """
    there, shape = find_weights(source), replace(read_shape(source), mtp_layers=mtp_layers)
    config = read_json(source / "config.json")
    tensors = _fresh(mtp_weights(shape), _dtype(config, there), seed)
    path.mkdir(parents=True, exist_ok=True)
    new = "model-mtp.safetensors"
    for file in source.resolve().iterdir():
        if file.is_file() and file.name not in ("config.json", INDEX, new):
            (path / file.name).symlink_to(file.resolve())
    save_file(tensors, str(path / new), metadata={"format": "pt"})
    files = {name: one.file.name for name, one in there.tensors.items()} | dict.fromkeys(tensors, new)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    key = next((key for key in MTP_KEYS if key in config), MTP_KEYS[0])
    (path / "config.json").write_text(json.dumps(config | {key: mtp_layers}, indent=2))


def _dtype(config: dict[str, Any], there: WeightsOnDisk) -> torch.dtype:
    named = str(config.get("dtype") or config.get("torch_dtype"))
    if found := [one for one in TORCH_DTYPES.values() if str(one) == f"torch.{named}"]:
        return found[0]
    elements: Counter[str] = Counter()
    for one in there.tensors.values():
        elements[one.entry.dtype] += math.prod(one.entry.shape)
    return TORCH_DTYPES[max(elements.keys() & TORCH_DTYPES.keys(), key=lambda dtype: elements[dtype])]


def _fresh(weights: Iterable[Weight], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for weight in weights:
        for name, shape in weight.tensors:
            kind = dtype if weight.trained else torch.float32
            if len(shape) == 1:
                one = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            else:
                one = torch.empty(shape).normal_(0, INITIAL_STD, generator=generator)
            tensors[name] = one.to(kind)
    return tensors
