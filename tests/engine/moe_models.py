"""Tiny models with experts, and MiMo's trunk: variants of a few architectures, as transformers makes them and as files
hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracle.models import hub_names as hub_names

VOCAB = 61  # odd: padding of the vocabulary is in play under tp

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "attn_implementation": "sdpa",
    "experts_implementation": "eager",
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "beta_fast": 4.0,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}


_GLM: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
}


def config(name: str) -> Any:
    from transformers import DeepseekV3Config, Glm4MoeConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig

    qwen = {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "rms_norm_eps": 1e-6}
    if name == "qwen3_moe":
        return Qwen3MoeConfig(norm_topk_prob=True, **qwen, **_SIZES)
    if name == "qwen3_moe-sparse":  # weights of all experts, and experts in every other layer
        return Qwen3MoeConfig(norm_topk_prob=False, decoder_sparse_step=2, **qwen, **_SIZES)
    if name in ("deepseek_v3", "deepseek_v3-idle"):
        return DeepseekV3Config(**_LATENT, **_SIZES)
    if name == "deepseek_v3-yarn":  # YaRN, no groups, no query latent, another norm_eps than the latents'
        other = {"n_group": 1, "q_lora_rank": None, "rms_norm_eps": 1e-3, "rope_parameters": _YARN}
        return DeepseekV3Config(**(_LATENT | other), **_SIZES)
    if name == "glm4_moe":
        return Glm4MoeConfig(**_GLM, **_SIZES)
    if name == "glm4_moe-yarn":  # YaRN on half of each head, neither norms nor biases, tied
        rope = {key: _YARN[key] for key in ("rope_type", "rope_theta", "factor")}
        rope |= {"original_max_position_embeddings": 32, "partial_rotary_factor": 0.5}
        other = {"use_qk_norm": False, "attention_bias": False, "rope_parameters": rope}
        return Glm4MoeConfig(**(_GLM | other), **(_SIZES | {"tie_word_embeddings": True}))
    if name == "mixtral":
        return MixtralConfig(num_key_value_heads=2, num_local_experts=8, **_SIZES)
    if name == "mimo":
        return Qwen2Config(num_key_value_heads=2, **_SIZES)
    if name == "deepseek_v3-halves":
        return DeepseekV3Config(rope_interleave=False, **_LATENT, **_SIZES)
    if name == "deepseek_v3-dense":
        return DeepseekV3Config(**(_LATENT | {"first_k_dense_replace": 4}), **_SIZES)
    raise KeyError(name)


FAMILIES = [
    "qwen3_moe",
    "qwen3_moe-sparse",
    "mixtral",
    "deepseek_v3",
    "deepseek_v3-yarn",
    "deepseek_v3-halves",
    "glm4_moe",
    "glm4_moe-yarn",
]
ARCHITECTURES = {"mimo": "MiMoForCausalLM"}
"""What config.json says where it is not transformers' class."""


def model(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(name), dtype=torch.float32)
    draw(made)
    if name == "deepseek_v3-idle":  # every token chooses the first two experts
        for key, buffer in made.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer[:2] += 10
    return made


@torch.no_grad()
def draw(made: torch.nn.Module) -> None:
    """Weights at which every parameter matters: matrices keep the size of what they multiply, norms and biases are off
    their neutral values."""
    for key, p in made.named_parameters():
        if p.dim() == 1:
            p.add_(0.1 * torch.randn_like(p))
        else:
            p.normal_(0, 1.0 if "embed" in key else p.shape[-1] ** -0.5)
    for key, buffer in made.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)


def save(name: str, path: Path) -> Path:
    """Write a model as a Hugging Face directory, once."""
    if not (path / "config.json").exists():
        model(name).save_pretrained(path)
        if name in ARCHITECTURES:
            data = json.loads((path / "config.json").read_text())
            data["architectures"] = [ARCHITECTURES[name]]
            (path / "config.json").write_text(json.dumps(data))
    return path


def stored(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory, by name."""
    from safetensors.torch import load_file

    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
