"""The tiny models: configurations, weights of a size at which every parameter matters, and how they look on disk.

Transformers keeps a layer's experts fused (gate and up in one [E, 2I, H] tensor); `hub_names` gives parameters and
gradients the names and shapes that files on the hub have, one an expert and matrix.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.oracle.data import VOCAB

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "sdpa",
}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}  # q is wider than the model
_EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "experts_implementation": "eager",
}


def _qwen2(tied: bool) -> Qwen2Config:
    return Qwen2Config(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, **_SIZES)


def _deepseek_v3(tied: bool) -> DeepseekV3Config:
    return DeepseekV3Config(
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=24,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=0,
        tie_word_embeddings=tied,
        **_EXPERTS,
        **_SIZES,
    )


def _glm4_moe() -> Glm4MoeConfig:
    return Glm4MoeConfig(
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
        attention_bias=True,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        **_HEADS,
        **_EXPERTS,
        **_SIZES,
    )


def _mixtral() -> MixtralConfig:
    experts = {key: _EXPERTS[key] for key in ("num_experts_per_tok", "experts_implementation")}
    return MixtralConfig(num_local_experts=8, tie_word_embeddings=False, **_HEADS, **experts, **_SIZES)


def _gpt_oss(experts: int = 4, top_k: int = 2) -> GptOssConfig:
    """Every second layer sees 5 tokens; some gates and ups are beyond the limit."""
    other = {"attn_implementation": "eager", "rms_norm_eps": 1e-5, "intermediate_size": 48}
    chosen = {"num_experts_per_tok": top_k, "experts_implementation": "eager"}
    return GptOssConfig(
        num_local_experts=experts,
        sliding_window=5,
        swiglu_limit=2.0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
        **_HEADS,
        **chosen,
        **(_SIZES | other),
    )


CONFIGS = {
    "qwen3": Qwen3Config(tie_word_embeddings=False, **_HEADS, **_SIZES),
    "qwen3-tied": Qwen3Config(tie_word_embeddings=True, **_HEADS, **_SIZES),
    "qwen2": _qwen2(tied=False),
    "qwen2-tied": _qwen2(tied=True),
    "mimo": _qwen2(tied=False),  # its trunk
    "llama": LlamaConfig(
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        **_SIZES,
    ),
}
MOE_CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(num_experts=8, tie_word_embeddings=False, **_HEADS, **_EXPERTS, **_SIZES),
    "deepseek_v3": _deepseek_v3(tied=False),
    "deepseek_v3-tied": _deepseek_v3(tied=True),
    "glm4_moe": _glm4_moe(),
    "mixtral": _mixtral(),
    "gpt_oss": _gpt_oss(),
    "gpt_oss-top4": _gpt_oss(experts=8, top_k=4),
}
ARCHITECTURES = {"mimo": ("Qwen2For", "MiMoFor")}
"""What config.json says in place of transformers' class."""
SEEDS = {
    "qwen3_moe": 675,
    "deepseek_v3": 1478,
    "deepseek_v3-tied": 1478,
    "glm4_moe": 1474,
    "mixtral": 1078,
    "gpt_oss": 824,
}
"""Of the weights, where `reference` asks for certain ones; other models have 0."""


def model(name: str) -> Any:
    """The transformers model of a name, the same weights at each call."""
    return drawn(name, SEEDS.get(name, 0))


def drawn(name: str, seed: int) -> Any:
    """Matrices keep the size of what they multiply; norms and biases are off their neutral values. An embedding that is
    the head as well is smaller, for logits of the size of other models'."""
    return of_config((CONFIGS | MOE_CONFIGS)[name], seed)


def of_config(config: Any, seed: int = 0) -> Any:
    """A model of any configuration, with weights as `drawn` makes them."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in made.modules():
        if hasattr(module, "limit") and hasattr(config, "swiglu_limit"):
            # transformers before 5.19 takes 7.0, whatever the configuration says
            module.limit = config.swiglu_limit
    with torch.no_grad():
        for key, p in made.named_parameters():
            if key.endswith("router.bias"):
                p.normal_()  # apart: ties are rarer
            elif p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
            else:
                embedding = 0.25 if made.config.tie_word_embeddings else 1.0
                p.normal_(0, embedding if key.endswith("embed_tokens.weight") else p.shape[-1] ** -0.5)
        for key, buffer in made.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return made


def save(name: str, path: Path, head: str = "lm") -> Path:
    """Write a model as a Hugging Face directory, once. A value model is transformers' classifier with one label."""
    if not (path / "config.json").exists():
        made = model(name)
        if head == "value":
            trunk, config = made.model, copy.deepcopy(made.config)
            config.num_labels = 1
            made = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
            made.model = trunk
            made.score.weight = torch.nn.Parameter(value_head())
        made.save_pretrained(path)
        if name in ARCHITECTURES:
            text = (path / "config.json").read_text()
            (path / "config.json").write_text(text.replace(*ARCHITECTURES[name]))
    return path


def value_head() -> Tensor:
    """Weight of the linear score that takes the LM head's place in a value model: [1, hidden]."""
    return torch.randn(1, 64, generator=torch.Generator().manual_seed(5)) / 8


def peft_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Adapters, or gradients, an expert each: `tests.oracle.lora` holds those of all experts in one tensor."""
    out = {}
    for name, tensor in named:
        if tensor.dim() == 3:
            for e, one in enumerate(tensor):
                out[name.replace(".experts.", f".experts.{e}.")] = one
        else:
            out[name] = tensor
    return out


def hub_names(named: Iterable[tuple[str, Tensor]], family: str = "") -> dict[str, Tensor]:
    """Parameters, or gradients, under the names that files on the hub have."""
    if family.startswith("gpt_oss"):
        return dict(named)  # its files have all experts of a layer in one tensor as well
    out = _one_an_expert(named)
    if not family.startswith("mixtral"):
        return out
    theirs = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for ours, its in theirs.items():
        out = {name.replace(ours, its): tensor for name, tensor in out.items()}
    return out


def _one_an_expert(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in named:
        if ".lora_" in name:
            out |= peft_names([(name, tensor)])
        elif name.endswith(".experts.gate_up_proj"):
            for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                out[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                out[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
        elif name.endswith(".experts.down_proj"):
            for e, down in enumerate(tensor):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = down
        else:
            out[name] = tensor
    return out
