"""The work of the benchmark of drafts: models whose drafts are accepted as often as one likes, and how many sequences of what length.

Imports without torch: the parent process plans with it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ACCEPTANCE = 0.75
"""Of each drafted token, if those before it were accepted."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a MiMo: heads of 64 (32 for hidden sizes under 256), a quarter as many for keys and values."""

    hidden: int
    layers: int
    ffn: int
    vocab: int
    sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    response: int

    @property
    def heads(self) -> int:
        return self.hidden // (64 if self.hidden >= 256 else 32)

    def config(self, longest: int) -> dict[str, Any]:
        """Return config.json's content."""
        return {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",  # transformers knows a MiMo as its trunk
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "num_attention_heads": self.heads,
            "num_key_value_heads": max(1, self.heads // 4),
            "head_dim": self.hidden // self.heads,
            "max_position_embeddings": longest,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "num_nextn_predict_layers": 1,
        }


SHAPES = {
    # 445M parameters.
    "400m": Shape(1024, 24, 4096, 32768, (1, 8, 32, 64, 256), (512, 4096), 256),
    "laptop": Shape(128, 4, 384, 512, (1, 8, 32), (64, 256), 48),
    "tiny": Shape(128, 2, 256, 256, (1, 4), (32,), 16),
}


def write_model(path: Path, shape: Shape, longest: int, dtype: Any) -> None:
    """Write a model of this shape, as a Hugging Face directory, in which a token is followed by one certain other with probability
    ACCEPTANCE, and by any of the rest alike.

    What layers add to the residual stream is zero, so that a token's state is its embedding: a decoder of this size takes as long with
    zeros as with other numbers. The head has the embedding of token t in the row of the token that follows t, at the scale that gives
    ACCEPTANCE; the layer that drafts hands the next token's embedding on, and so drafts the likeliest token.
    """
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    h, f, v, kv = (
        shape.hidden,
        shape.ffn,
        shape.vocab,
        max(1, shape.heads // 4) * (shape.hidden // shape.heads),
    )
    embedding = torch.nn.functional.normalize(torch.randn(v, h), dim=-1) * math.sqrt(h)
    head = torch.empty(v, h)
    head[torch.randperm(v)] = embedding * math.log(ACCEPTANCE / (1 - ACCEPTANCE) * (v - 1)) / h

    def layer(prefix: str) -> dict[str, Any]:
        ones, random = torch.ones(h), 1 / math.sqrt(h)
        return {
            prefix + "input_layernorm.weight": ones.clone(),
            prefix + "post_attention_layernorm.weight": ones.clone(),
            **{
                f"{prefix}self_attn.{x}_proj.weight": torch.randn(n, h) * random
                for x, n in (("q", h), ("k", kv), ("v", kv))
            },
            **{
                f"{prefix}self_attn.{x}_proj.bias": torch.zeros(n)
                for x, n in (("q", h), ("k", kv), ("v", kv))
            },
            prefix + "self_attn.o_proj.weight": torch.zeros(h, h),
            prefix + "mlp.gate_proj.weight": torch.randn(f, h) * random,
            prefix + "mlp.up_proj.weight": torch.randn(f, h) * random,
            prefix + "mlp.down_proj.weight": torch.zeros(h, f),
        }

    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(h),
    }
    for number in range(shape.layers):
        tensors |= layer(f"model.layers.{number}.")
    drafts = "model.mtp_layers.0."
    tensors |= layer(drafts)
    tensors |= {f"{drafts}{x}_layernorm.weight": torch.ones(h) for x in ("token", "hidden", "final")}
    tensors[f"{drafts}input_proj.weight"] = torch.cat([torch.zeros(h, h), torch.eye(h)], 1)
    path.mkdir(parents=True)
    save_file(
        {name: t.to(dtype) for name, t in tensors.items()},
        str(path / "model.safetensors"),
        metadata={"format": "pt"},
    )
    (path / "config.json").write_text(json.dumps(shape.config(longest)))
