"""Adapters for the oracle: drawn once, written as peft would write them, and merged into a transformers model.

They are told from the transformers model alone: every linear layer but the head and the routers, and each matrix of each
expert. The reference computes with W + scale · B A, never with adapters beside the layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.oracle.ahead import save_with_layers
from tests.oracle.cases import Case
from tests.oracle.models import model, save

RANK, ALPHA = 4, 12.0
SCALE = ALPHA / RANK
SEEDS = {"deepseek_v3": 45}
"""Of the adapters, where `reference` asks for certain ones; other models have 0."""
_PREFIX = "base_model.model."


class Merged(nn.Module):
    """A weight [..., out, in] with adapters beside each of the equal parts that its rows are made of."""

    def __init__(self, weight: Tensor, parts: tuple[str, ...], generator: torch.Generator) -> None:
        super().__init__()
        *experts, out, width = weight.shape
        self.parts = parts

        def drawn(*shape: int, size: float) -> nn.Parameter:
            values = torch.randn(*experts, *shape, generator=generator) * size
            return nn.Parameter(values.to(weight.dtype))

        self.a = nn.ParameterList([drawn(RANK, width, size=width**-0.5) for _ in parts])
        self.b = nn.ParameterList([drawn(out // len(parts), RANK, size=0.03) for _ in parts])

    def forward(self, weight: Tensor) -> Tensor:
        return weight + SCALE * torch.cat([b @ a for a, b in zip(self.a, self.b, strict=True)], dim=-2)


def attach(model: Any, name: str, seed: int | None = None) -> dict[str, nn.Parameter]:
    """Freeze a transformers model and merge adapters into it; returns them by name, experts' as `peft_names` takes them."""
    generator = torch.Generator().manual_seed(SEEDS.get(name, 0) if seed is None else seed)
    model.requires_grad_(False)
    found = {}
    for module, weight, parts in list(_matrices(model)):
        merged = Merged(getattr(module[1], weight), parts, generator)
        parametrize.register_parametrization(module[1], weight, merged, unsafe=True)
        for part, a, b in zip(parts, merged.a, merged.b, strict=True):
            for which, tensor in (("lora_A", a), ("lora_B", b)):
                found[f"{_PREFIX}{module[0]}{part}.{which}.weight"] = tensor
    return found


def _matrices(model: Any) -> Iterator[tuple[tuple[str, Any], str, tuple[str, ...]]]:
    for name, module in model.model.named_modules(prefix="model"):
        if isinstance(module, nn.Linear):
            yield (name, module), "weight", ("",)
        elif name.endswith(".experts") and not hasattr(module, "gate_up_proj_bias"):  # gpt-oss's have none
            yield (name, module), "gate_up_proj", (".gate_proj", ".up_proj")
            yield (name, module), "down_proj", (".down_proj",)


def base_names(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights of a model with adapters under the names they had before."""
    for name, tensor in named:
        if ".parametrizations." not in name:
            yield name, tensor
        elif name.endswith(".original"):
            yield name.replace(".parametrizations.", ".").removesuffix(".original"), tensor


def written(case: Case, models: Path) -> Path:
    """The Hugging Face directory of a case's model, which is below `models`, with its adapters in it."""
    if case.mtp:
        return save_with_layers(case.family, case.mtp, models / f"{case.family}-mtp{case.mtp}")
    path = save(case.family, models / f"{case.family}-{case.head}", case.head)
    if case.lora:
        save_adapters(case.family, case.adapters(path))
    return path


def save_adapters(name: str, path: Path) -> Path:
    """Write a model's adapters as a directory of peft's, once."""
    if not (path / "adapter_config.json").exists():
        made = attach(model(name), name)
        tensors = {key: tensor.data for key, tensor in made.items() if tensor.dim() == 2}
        patterns: dict[str, float] = {}
        for key in made:
            module, _, which = key.rpartition(".gate_proj.lora_A")
            if which and module.endswith(".experts"):
                held = {k.removeprefix(f"{module}."): t.data for k, t in made.items() if k.startswith(module)}
                tensors |= _of_experts(module, held)
                patterns[module.removeprefix(_PREFIX) + ".gate_up_proj"] = 2
        modules = sorted({key.split(".")[-3] for key, tensor in made.items() if tensor.dim() == 2})
        config = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": modules,
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"] if patterns else None,
            "rank_pattern": {key: int(n * RANK) for key, n in patterns.items()},
            "alpha_pattern": {key: n * ALPHA for key, n in patterns.items()},
        }
        path.mkdir(parents=True, exist_ok=True)
        save_file(
            {key: t.contiguous() for key, t in tensors.items()}, str(path / "adapter_model.safetensors")
        )
        (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def _of_experts(module: str, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """peft's two tensors of each parameter: A [E · R, in], B [out, R · E] with the experts fastest."""
    gate_up = torch.cat((held["gate_proj.lora_A.weight"], held["up_proj.lora_A.weight"]), dim=1)
    blocks = [
        torch.block_diag(gate, up)
        for gate, up in zip(held["gate_proj.lora_B.weight"], held["up_proj.lora_B.weight"], strict=True)
    ]
    out = {}
    for prefix, a, b in (
        (f"{module}.base_layer", gate_up, torch.stack(blocks)),
        (module, held["down_proj.lora_A.weight"], held["down_proj.lora_B.weight"]),
    ):
        out[f"{prefix}.lora_A.weight"] = a.flatten(0, 1)
        out[f"{prefix}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return out
