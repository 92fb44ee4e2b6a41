"""A tiny model of GLM-4.5's shape, with experts in its layer for multi-token prediction too, which drafts well as that of `mimo` does."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.mtp_models import KINDS, Layer
from tests.rollout.prompts import PROMPTS
from tests.rollout.vllm.models import model
from tests.rollout.vllm.test_worker import named_weights

_ADDED = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
"""What a layer adds to the residual stream comes out of these."""


def _soften(made: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(_ADDED):
                parameter.mul_(0.2)


@functools.cache
def trunk(seed: int = 0) -> Any:
    """In transformers."""
    made = model("glm4_moe", seed=seed)
    _soften(made)
    with torch.no_grad():
        embedding = made.model.embed_tokens.weight
        embedding.div_(embedding.pow(2).mean(-1, keepdim=True).sqrt())
        made.lm_head.weight.mul_(3)  # so that one token is much likelier than the others
    return made


@functools.cache
def layer(seed: int = 0) -> Layer:
    """It hands the embedding of the next token on, where the trunk's state has little more."""
    of, config = trunk(seed), trunk(seed).config
    block, norm, hidden = type(of.model.layers[-1]), type(of.model.norm), config.hidden_size
    made = Layer(
        KINDS["glm4_moe"], block(config, config.num_hidden_layers), norm, hidden, config.rms_norm_eps
    )
    made.block.load_state_dict(model("glm4_moe", seed=seed + 1000).model.layers[-1].state_dict())
    _soften(made)
    parts = torch.tensor([1.0, 0.2]).repeat_interleave(hidden)
    with torch.no_grad():
        made.final.weight.copy_(of.model.norm.weight)
        made.projection.weight.copy_(torch.eye(hidden).repeat(1, 2) * parts)
    return made


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """What an engine sends of trunk and layer: embedding and head once."""
    named = named_weights(trunk(seed))
    prefix, dtype = f"model.layers.{trunk(seed).config.num_hidden_layers}.", named["lm_head.weight"].dtype
    own = {n: t if n.endswith("_bias") else t.to(dtype) for n, t in layer(seed).named(prefix).items()}
    return named | own


def save(path: Path) -> Path:
    """Write it as a Hugging Face directory."""
    trunk().save_pretrained(path)
    save_file(tensors(), str(path / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path


def greedy(tokens: int, seed: int = 0) -> list[list[int]]:
    """The trunk's greedy responses to PROMPTS, by transformers."""
    rows = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(tokens):
            with torch.no_grad():
                ids.append(int(trunk(seed)(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        rows.append(ids[len(prompt) :])
    return rows
