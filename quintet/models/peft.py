"""Adapters as peft keeps them on disk: adapter_config.json, and where each tensor lies in adapter_model.safetensors.

A linear layer's A and B lie there as they are. transformers 5 has no linear layers of single experts: all of a layer are
two parameters, `experts.gate_up_proj` and `experts.down_proj`, which peft adapts by `target_parameters`. Of E experts and
rank R such an A is [E · R, in], an expert after the other, and B is [out, R · E], the experts of each rank side by side.
Gate and up with adapters of their own, each of rank r, are one of rank R = 2 r whose B is zero off its two blocks; alpha
grows with it so that the scale is the same (`rank_pattern`, `alpha_pattern`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.errors import UserError
from quintet.models.hf_config import HfConfig, read_json
from quintet.models.lora import ALL_LINEAR, PEFT_PREFIX, Linear, LoraShape, adapted, adapter_weights, linears
from quintet.models.safetensors_header import Entry, read_header
from quintet.models.weight import Weight
from quintet.models.weights_on_disk import titled

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SCORE = f"{PEFT_PREFIX}score.weight"
"""The head of a value model, which is trained and saved with the adapters."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, [], ["score"]),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
}
"""Keys of adapter_config.json that change what adapters compute, and the values at which they do not."""


@dataclass(frozen=True)
class Place:
    """The place of an adapter's A or B: in the file's tensor `name` of `shape`, of which it may be a part.

    experts: how many the tensor holds, 0 where it holds one layer's alone. Then it is the part of `expert`, of the ranks
    from `start` on among `ranks` of each expert, and of B the rows `rows`.
    """

    name: str
    shape: tuple[int, ...]
    experts: int = 0
    expert: int = 0
    start: int = 0
    ranks: int = 0
    rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Fused:
    """The parameter that holds one matrix (gate over up, or down) of all experts of a layer: its name, the layers in it,
    expert by expert, and the prefix of its A and B in the file."""

    name: str
    experts: tuple[Linear, ...]
    prefix: str

    def tensor(self, which: str, ranks: int) -> tuple[str, tuple[int, int]]:
        """Return the name and shape of lora_A or lora_B in the file, given the ranks of an expert."""
        parts, held = self.experts[0].parts, len(self.experts) * ranks
        shape = (held, parts[0].in_) if which == "lora_A" else (sum(p.out for p in parts), held)
        return f"{self.prefix}.{which}.weight", shape


def fused_experts(weights: Iterable[Weight], lora: LoraShape) -> list[Fused]:
    """Return the parameters of experts that have adapters, in the order of the layers."""
    by_layer: dict[str, list[Linear]] = {}
    for linear in linears(weights):
        if linear.split.startswith("expert_") and adapted(linear, lora):
            by_layer.setdefault(linear.of_layer, []).append(linear)
    found = []
    for name, held in by_layer.items():
        module, first = _module_of(held[0]), name.endswith("fc1")
        # peft wraps the module once for each parameter, gate_up_proj first.
        inner = first and name.replace("fc1", "fc2") in by_layer
        prefix = f"{PEFT_PREFIX}{module}{'.base_layer' if inner else ''}"
        found.append(Fused(f"{module}.{'gate_up_proj' if first else 'down_proj'}", tuple(held), prefix))
    return found


def _module_of(linear: Linear) -> str:
    """What transformers 5 calls the module of all experts of a layer; files on the hub may name it otherwise."""
    found = re.match(r"(.*\.experts)\.\d+\.[^.]+$", linear.parts[0].name)
    assert found is not None, f"{linear.parts[0].name} is no layer of an expert"
    return found[1].replace(".block_sparse_moe.", ".mlp.")


def places(
    weights: Sequence[Weight], lora: LoraShape, ranks_of: Mapping[str, int] | None = None
) -> dict[str, Place]:
    """Return where every adapter tensor lies, by its name in the table.

    ranks_of: of each fused parameter, by its name, the ranks of an expert in a file that is read: as many as one adapter has
    where gate and up share A. Otherwise each has ranks of its own.
    """
    found = {one.hf[0]: Place(one.hf[0], one.shapes[0]) for one in adapter_weights(weights, lora)}
    for fused in fused_experts(weights, lora):  # whose adapters are in other places
        wide = lora.rank * len(adapted(fused.experts[0], lora))
        ranks = (ranks_of or {}).get(fused.name, wide)
        for number, linear in enumerate(fused.experts):
            chosen, top = adapted(linear, lora), 0
            for part in linear.parts:
                rows, top = (top, top + part.out), top + part.out
                if part not in chosen:
                    continue
                start = chosen.index(part) * lora.rank if ranks == wide else 0
                for which in ("lora_A", "lora_B"):
                    place = Place(*fused.tensor(which, ranks), len(fused.experts), number, start, ranks, rows)
                    found[f"{PEFT_PREFIX}{part.name}.{which}.weight"] = place
    return found


def adapter_config(
    weights: Sequence[Weight], lora: LoraShape, base: str | None, *, value: bool
) -> dict[str, Any]:
    """Return adapter_config.json. base: the model that the adapters are for. value: of a value model, whose head is with them."""
    layers = list(linears(weights))
    plain = [linear for linear in layers if not linear.split.startswith("expert_")]
    on = {part.name for linear in plain for part in adapted(linear, lora)}
    # In models with experts peft 0.21 takes every module with the name of an expert's (gate_proj, …) for experts.
    by_parameter = {name for name in on if len(plain) < len(layers) and ".self_attn." not in name}
    fused = fused_experts(weights, lora)
    wide = {one.name: len(adapted(one.experts[0], lora)) for one in fused}
    wide = {name: n for name, n in wide.items() if n > 1}
    # rslora divides by the root of the rank.
    grown = {name: lora.alpha * (math.sqrt(n) if lora.rslora else n) for name, n in wide.items()}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if value else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": short(on - by_parameter, {p.name for linear in plain for p in linear.parts}),
        "target_parameters": sorted({f"{name}.weight" for name in by_parameter} | {one.name for one in fused})
        or None,
        "rank_pattern": {name: n * lora.rank for name, n in wide.items()},
        "alpha_pattern": grown,
        "modules_to_save": ["score"] if value else None,
    }


def short(on: set[str], everything: set[str]) -> list[str]:
    """Return the names that mean just these modules: the last part of the name where it means no other."""
    out: set[str] = set()
    for name in on:
        key = name.rpartition(".")[2]
        out.add(key if {one for one in everything if one.endswith(f".{key}")} <= on else name)
    return sorted(out)


def read_adapter(path: Path, weights: Sequence[Weight]) -> tuple[LoraShape, dict[str, Place]]:
    """Return what adapters a directory of peft's holds for the model of a table, and where; reads no weight.

    Raises UserError naming the file for what is missing, damaged, of another model, or not supported.
    """
    file, tensors = Path(path) / CONFIG, Path(path) / WEIGHTS
    if not file.is_file():
        raise UserError(f"{file} does not exist; name a directory that peft's save_pretrained wrote")
    data = read_json(file)
    config = HfConfig(data, str(file))
    if config.text("peft_type", "LORA") != "LORA":
        raise config.wrong("peft_type", '"LORA"')
    for key, accepted in _REFUSED.items():
        if data.get(key) not in accepted:
            raise config.wrong(key, "none: adapters that compute this are not supported")
    held = read_header(tensors).tensors
    rank, alpha, rslora = config.whole("r"), config.number("lora_alpha"), config.flag("use_rslora", False)
    every = LoraShape(rank, alpha, (ALL_LINEAR,), rslora)
    on, ranks_of = _adapted_in(held, weights, every, config)
    names = {part.name for linear in linears(weights) for part in linear.parts}
    lora = LoraShape(rank, alpha, (ALL_LINEAR,) if on == names else tuple(short(on, names)), rslora)
    found = places(weights, lora, ranks_of)
    _check_tensors(held, found, tensors)
    _check_scales(config, lora)
    return lora, found


def _adapted_in(
    held: Mapping[str, Entry], weights: Sequence[Weight], every: LoraShape, config: HfConfig
) -> tuple[set[str], dict[str, int]]:
    """The layers that have adapters in a file, and of each fused parameter with some the ranks of an expert."""
    on: set[str] = set()
    for linear in linears(weights):
        on |= {p.name for p in linear.parts if f"{PEFT_PREFIX}{p.name}.lora_A.weight" in held}
    targets = config.texts("target_parameters")
    ranks_of: dict[str, int] = {}
    for fused in fused_experts(weights, every):
        if any(fused.name == one or fused.name.endswith(f".{one}") for one in targets):
            on |= {part.name for linear in fused.experts for part in linear.parts}
            module = fused.name.rpartition(".")[0]
            for prefix in (fused.prefix, f"{PEFT_PREFIX}{module}"):
                if (entry := held.get(f"{prefix}.lora_A.weight")) is not None:
                    ranks_of[fused.name] = entry.shape[0] // len(fused.experts)
                    break
    return on, ranks_of


def _check_tensors(held: Mapping[str, Entry], found: Mapping[str, Place], file: Path) -> None:
    """Every tensor accounted for, each of the shape that the model and the rank imply."""
    wanted = {place.name: place.shape for place in found.values()}
    missing, extra = sorted(set(wanted) - set(held)), sorted(set(held) - set(wanted) - {SCORE})
    if missing or extra or not wanted:
        said = titled({"missing": missing, "left over": extra})
        raise UserError(f"{file}: its tensors are not adapters of this model's linear layers; {said}")
    for name, shape in wanted.items():
        if held[name].shape != shape:
            raise UserError(f"{file}: {name} has shape {held[name].shape}, model and rank imply {shape}")


def _check_scales(config: HfConfig, lora: LoraShape) -> None:
    """One scale for all: rank_pattern and alpha_pattern may differ only where experts are fused."""
    ranks, alphas = config.section("rank_pattern"), config.section("alpha_pattern")
    for pattern in {**ranks.data, **alphas.data}:
        rank, alpha = ranks.number(pattern, float(lora.rank)), alphas.number(pattern, lora.alpha)
        scale = alpha / (math.sqrt(rank) if lora.rslora else rank)
        if not math.isclose(scale, lora.scale, rel_tol=1e-6):
            raise alphas.wrong(
                pattern,
                f"one that keeps the scale of {lora.scale:g} with rank {rank:g}: all adapters have one",
            )
