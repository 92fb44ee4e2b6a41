"""Layers for multi-token prediction beside the oracle's models, and their losses by hand.

transformers has no such layers for these families: see `tests.engine.mtp_models`, whose parts these are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine import moe_models
from tests.engine.mtp_models import KINDS, Kind, Layer
from tests.oracle.data import ahead_counts, loss_mask
from tests.oracle.models import hub_names, model, save

SEEDS = {"deepseek_v3": 18, "glm4_moe": 13}
"""Of two layers, where `reference` asks for certain ones; other models have 0."""


def kind_of(name: str) -> Kind:
    return KINDS[name.removesuffix("-tied")]


def layers_of(name: str, depths: int, seed: int | None = None) -> torch.nn.ModuleList:
    """The layers of a model, the same weights at each call."""
    trunk = model(name)
    config, block = trunk.config, type(trunk.model.layers[-1])
    torch.manual_seed(100 + (SEEDS.get(name, 0) if seed is None else seed))
    layers = torch.nn.ModuleList()
    for depth in range(depths):
        number = config.num_hidden_layers + depth if hasattr(config, "n_routed_experts") else 0
        made = Layer(
            kind_of(name),
            block(config, number),
            type(trunk.model.norm),
            config.hidden_size,
            config.rms_norm_eps,
        )
        moe_models.draw(made)
        layers.append(made)
    return layers


def named(name: str, layers: Any) -> list[tuple[str, Tensor]]:
    """Parameters and buffers as transformers would name them in the model."""
    if not len(layers):
        return []
    kind, found = kind_of(name), []
    first = model(name).config.num_hidden_layers if "mtp_layers" not in kind.prefix else 0
    parts = {"enorm": kind.enorm, "hnorm": kind.hnorm, "projection": kind.projection, "final": kind.final}
    for number, layer in enumerate(layers):
        prefix = kind.prefix.format(first + number)
        found += [(f"{prefix}{its}.weight", getattr(layer, ours).weight) for ours, its in parts.items()]
        found += [(prefix + n, t) for n, t in (*layer.block.named_parameters(), *layer.block.named_buffers())]
    return found


def save_with_layers(name: str, depths: int, path: Path) -> Path:
    """Write a model with layers as a Hugging Face directory, once."""
    if not (path / "config.json").exists():
        save(name, path)
        tensors = load_file(path / "model.safetensors")
        made = ((n, t.detach().clone().contiguous()) for n, t in named(name, layers_of(name, depths)))
        save_file(tensors | hub_names(made, name), str(path / "model.safetensors"), metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": depths}))
    return path


def losses(
    run: Any, padded: Tensor, plain: Tensor, normed: Tensor, batch: int, *, loss: str, detach: bool
) -> tuple[list[Tensor], list[float]]:
    """The loss of each depth, a mean over its own targets, and the share of targets that are the likeliest token.

    run: with `model` and `layers`. padded: [samples, T] ids, -1 where a sample has ended; plain, normed: the trunk's states
    [samples, T, H] before and after its final norm.
    """
    embedding, head = run.model.model.embed_tokens.weight, run.model.lm_head.weight
    hidden = normed if kind_of(run.name).normed else plain
    teacher = F.linear(normed, head).detach().softmax(-1)
    if detach:
        embedding, head, hidden = embedding.detach(), head.detach(), hidden.detach()
    ids, rotary = padded.clamp(min=0), run.model.model.rotary_emb(hidden, torch.arange(padded.shape[1])[None])
    masks = [torch.tensor(loss_mask(int(n), ahead=True)) for n in (padded >= 0).sum(1)]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    found, right = [], []
    for depth, layer in enumerate(run.layers, start=1):
        following = F.pad(ids[:, depth:], (0, depth))
        hidden = layer(hidden, F.embedding(following, embedding), rotary)
        far = 1 + depth
        log_p = F.linear(hidden, head).log_softmax(-1)[:, :-far]
        if loss == "cross_entropy":
            per_token = -log_p.gather(2, ids[:, far:, None])[..., 0]
        else:
            per_token = -(teacher[:, depth:-1] * log_p).sum(-1)
        count = ahead_counts(batch, len(run.layers))[depth]
        found.append((per_token * mask[:, far:]).sum() / count)
        right.append(((log_p.argmax(-1) == ids[:, far:]) * mask[:, far:]).sum().item() / count)
    return found, right
