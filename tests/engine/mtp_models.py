"""Tiny models with layers for multi-token prediction, as files on the hub hold them, and what they compute.

transformers has no such layers for these families. The reference is transformers' trunk and decoder layer, and the
projection and norms around the latter by hand: the order in which embedding and hidden state stand before the
projection, and whether the hidden state is taken before or after the trunk's final norm, are those of the families'
released code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine import moe_models

VOCAB = moe_models.VOCAB
LAYERS = 2
"""For multi-token prediction, after the trunk's."""


@dataclass(frozen=True)
class Kind:
    """How a family names and orders the parts."""

    prefix: str
    enorm: str
    hnorm: str
    projection: str
    final: str
    hidden_first: bool
    normed: bool
    """Whether the first layer reads the trunk's output after its final norm."""


_DEEPSEEK = Kind("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", False, True)
KINDS = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "mimo": Kind(
        "model.mtp_layers.{}.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        True,
        False,
    ),
}


class Layer(torch.nn.Module):
    """One layer for multi-token prediction around one of transformers' decoder layers."""

    def __init__(self, kind: Kind, block: torch.nn.Module, norm: Any, hidden: int, eps: float) -> None:
        super().__init__()
        self.kind, self.block = kind, block
        self.enorm, self.hnorm, self.final = (norm(hidden, eps=eps) for _ in range(3))
        self.projection = torch.nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, hidden: Tensor, embeddings: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[1, T, H] of one sample each."""
        parts = (self.enorm(embeddings), self.hnorm(hidden))
        joined = self.projection(torch.cat(parts[::-1] if self.kind.hidden_first else parts, -1))
        out = self.block(joined, attention_mask=None, position_embeddings=rotary)
        return self.final(out[0] if isinstance(out, tuple) else out)

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Its tensors under the names on the hub."""
        kind = self.kind
        ours = {"enorm": kind.enorm, "hnorm": kind.hnorm, "projection": kind.projection, "final": kind.final}
        out = {f"{prefix}{name}.weight": getattr(self, part).weight for part, name in ours.items()}
        block = [(prefix + n, p) for n, p in (*self.block.named_parameters(), *self.block.named_buffers())]
        return {n: t.detach().clone().contiguous() for n, t in (out | moe_models.hub_names(block)).items()}


@dataclass(frozen=True)
class Model:
    """A trunk and its layers for multi-token prediction."""

    family: str
    trunk: Any
    layers: list[Layer]

    def states(self, ids: list[int]) -> list[Tensor]:
        """Hidden states [T, H] of each layer for one sample: the first reads each token's next one, the second the one after it."""
        seen = []
        hook = self.trunk.model.norm.register_forward_hook(
            lambda module, args, out: seen.extend((*args, out))
        )
        with torch.no_grad():
            self.trunk.model(input_ids=torch.tensor([ids]))
            hook.remove()
            hidden = seen[1] if KINDS[self.family].normed else seen[0]
            rotary = self.trunk.model.rotary_emb(hidden, torch.arange(len(ids))[None])
            out = []
            for depth, layer in enumerate(self.layers, start=1):
                following = torch.tensor([ids[depth:] + [0] * depth])
                hidden = layer(hidden, self.trunk.model.embed_tokens(following), rotary)
                out.append(hidden[0])
        return out


def model(family: str) -> Model:
    """The same weights at each call."""
    trunk = moe_models.model(family)
    config, kind = trunk.config, KINDS[family]
    block, norm = type(trunk.model.layers[-1]), type(trunk.model.norm)
    layers = []
    for i in range(LAYERS):
        made = Layer(
            kind,
            block(config, config.num_hidden_layers + i if hasattr(config, "n_routed_experts") else 0),
            norm,
            config.hidden_size,
            config.rms_norm_eps,
        )
        moe_models.draw(made)
        layers.append(made)
    return Model(family, trunk, layers)


def save(family: str, path: Path, *, copies: bool = True) -> Path:
    """Write a model as files on the hub have it, once. copies: of embedding and head, where the family has them."""
    if (path / "config.json").exists():
        return path
    made = model(family)
    moe_models.save(family, path)
    tensors = moe_models.stored(path)
    first = made.trunk.config.num_hidden_layers if KINDS[family].prefix == _DEEPSEEK.prefix else 0
    for i, layer in enumerate(made.layers):
        prefix = KINDS[family].prefix.format(first + i)
        tensors |= layer.named(prefix)
        if copies and family != "mimo":
            tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": LAYERS}))
    return path
