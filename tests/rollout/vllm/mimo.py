"""A tiny MiMo-shaped model whose layer for multi-token prediction drafts well, as files on the hub hold it.

What a token is followed by depends most on the token itself, in the trunk as in the layer: the residual stream is the embedding
and a little, by attention, of everything before.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.mtp_models import KINDS, Layer
from tests.oracle.models import hub_names
from tests.rollout.vllm.models import model

VOCAB = 61
_ADDED = ("o_proj.weight", "down_proj.weight")
"""What a layer adds to the residual stream comes out of these."""


@functools.cache
def trunk(seed: int = 0) -> Any:
    """In transformers."""
    made = model("mimo", seed=seed)
    _soften(made)
    with torch.no_grad():
        made.model.embed_tokens.weight.div_(
            made.model.embed_tokens.weight.pow(2).mean(-1, keepdim=True).sqrt()
        )
        made.lm_head.weight.mul_(3)  # so that one token is much likelier than the others
    return made


@functools.cache
def layer(seed: int = 0) -> Layer:
    """It hands the embedding of the next token on, where the trunk's state has little more."""
    of, config = trunk(seed), trunk(seed).config
    torch.manual_seed(seed + 1000)
    block, norm = type(of.model.layers[0]), type(of.model.norm)
    made = Layer(KINDS["mimo"], block(config, 0), norm, config.hidden_size, config.rms_norm_eps)
    made.block.load_state_dict(model("mimo", seed=seed + 1000).model.layers[0].state_dict())
    _soften(made)
    with torch.no_grad():
        made.final.weight.copy_(of.model.norm.weight)
        made.projection.weight.copy_(
            torch.eye(config.hidden_size).repeat(1, 2)
            * torch.tensor([0.2, 1.0]).repeat_interleave(config.hidden_size)
        )
        # Of another seed than 0 all are others, by little: none may stay behind unseen.
        for part in (made.enorm, made.hnorm, made.projection):
            part.weight.mul_(1 + (0.02 if seed else 0) * torch.randn_like(part.weight))
    return made


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Of trunk and layer, by their names on the hub."""
    named = hub_names(trunk(seed).named_parameters(), "mimo")
    return {n: t.detach().clone() for n, t in named.items()} | layer(seed).named("model.mtp_layers.0.")


def save(path: Path, seed: int = 0) -> Path:
    """Write it as a Hugging Face directory."""
    trunk(seed).save_pretrained(path)
    save_file(tensors(seed), str(path / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _soften(made: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(_ADDED):
                parameter.mul_(0.35)


@functools.cache
def distribution(prompt: tuple[int, ...], position: int, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Probabilities [vocabulary] of the token at a position of a response (0, 1 or 2), whatever those before it are, where each is drawn
    of the top_k likeliest and, of these, of the likeliest whose probabilities first reach top_p; fp64."""
    here, reached = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    for _ in range(position):
        reached = (reached[:, None] * _next(here, top_k, top_p)).flatten()
        here = torch.cat(
            [here.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(here))[:, None]], 1
        )
    return reached @ _next(here, top_k, top_p)


def _next(ids: Tensor, top_k: int, top_p: float) -> Tensor:
    with torch.no_grad():
        p = trunk()(input_ids=ids).logits[:, -1].double().softmax(-1)
    p, order = p.sort(-1, descending=True)
    p[:, top_k or VOCAB :] = 0
    p /= p.sum(-1, keepdim=True)
    p = p.where(p.cumsum(-1) - p < top_p, 0)  # as many as reach it, the one that does among them
    return torch.zeros_like(p).scatter_(-1, order, p / p.sum(-1, keepdim=True))
