"""The oracle: transformers, one process, fp32. What it says about a batch is what every layout must say.

Tiny models with weights large enough that every parameter matters, on disk as users have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

VOCAB = 61  # odd: padding of the vocabulary is always in play under tp
PROMPT = 3
LENGTHS = [7, 12, 5, 20, 9, 16, 4, 11]
NORM_FLOOR = 1e-6
"""Gradient errors are relative to the reference's norm plus this."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "sdpa",
}
CONFIGS = {
    "qwen3": Qwen3Config(head_dim=32, tie_word_embeddings=False, **_SIZES),
    "qwen3-tied": Qwen3Config(head_dim=32, tie_word_embeddings=True, **_SIZES),
    "qwen2": Qwen2Config(tie_word_embeddings=False, **_SIZES),
    "llama": LlamaConfig(
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


@dataclass
class Reference:
    """Mean negative log-likelihood of the response tokens, its gradients by name, log-probs and entropies flat."""

    loss: float
    gradients: dict[str, Tensor]
    logprobs: Tensor
    entropy: Tensor


def model(name: str) -> Any:
    """The transformers model of a name, the same weights at each call."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.mul_(3.0)
    return made


def save(name: str, path: Path) -> Path:
    """Write a model as a Hugging Face directory, once."""
    if not (path / "config.json").exists():
        model(name).save_pretrained(path)
    return path


def token_ids() -> list[list[int]]:
    """The batch: samples of LENGTHS tokens, PROMPT of each the prompt."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@cache
def reference(name: str) -> Reference:
    """What transformers says of the batch."""
    made = model(name)
    logprobs, entropy = [], []
    for ids in token_ids():
        x = torch.tensor(ids)
        log_p = made(input_ids=x[None]).logits[0].float().log_softmax(-1)
        per_token = log_p[:-1].gather(1, x[1:, None])[:, 0]
        spread = -(log_p.exp() * log_p).sum(-1)[:-1]
        blank = torch.zeros(PROMPT)
        logprobs.append(torch.cat([blank, per_token[PROMPT - 1 :]]))
        entropy.append(torch.cat([blank, spread[PROMPT - 1 :]]))
    flat = torch.cat(logprobs)
    loss = -flat.sum() / sum(n - PROMPT for n in LENGTHS)
    loss.backward()
    gradients = {n: p.grad for n, p in made.named_parameters() if p.grad is not None}
    return Reference(loss.item(), gradients, flat.detach(), torch.cat(entropy).detach())
