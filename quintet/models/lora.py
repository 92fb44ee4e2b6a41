"""Low-rank adapters (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685) as entries of the table of weights.

    y = W x + scale · B A x,   A: [rank, in],  B: [out, rank],  scale = alpha / rank, or with rslora alpha / √rank

Each Hugging Face linear layer has adapters of its own, also where megatron-core holds several as one (q, k and v; gate
and up): what is saved then is what peft would have made. A column-parallel layer's A is whole on every rank and its B
is cut like the layer; a row-parallel layer's A is cut along its input and its B is whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quintet.errors import UserError
from quintet.models.weight import Split, Weight

ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."
"""What peft puts before the name of a module of the base model."""

_CUT: dict[str, tuple[Split, Split]] = {
    "replicated": ("replicated", "replicated"),
    "rows": ("replicated", "rows"),
    "qkv": ("replicated", "rows"),
    "gate_up": ("replicated", "rows"),
    "columns": ("columns", "replicated"),
    "expert_gate_up": ("expert_replicated", "expert_rows"),
    "expert_columns": ("expert_columns", "expert_replicated"),
}
"""How A and B are cut beside a weight that is cut in one of these ways."""

_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)(\..*)")


@dataclass(frozen=True)
class LoraShape:
    """Adapters of one rank beside the linear layers that `targets` match (see `adapted`)."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rslora: bool = False

    @property
    def scale(self) -> float:
        """The factor that B A x is multiplied by (with rslora: https://arxiv.org/abs/2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class Part:
    """One Hugging Face linear layer of [out, in_] within one of megatron-core's. key: the last part of its name."""

    name: str
    out: int
    in_: int

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Linear:
    """A linear layer of megatron-core's, how its weight is cut, and the Hugging Face layers that it is made of."""

    name: str
    split: Split
    parts: tuple[Part, ...]

    @property
    def of_layer(self) -> str:
        """The linear layer's name, with one for all experts of a layer."""
        return _EXPERT.sub(r"\1*\3", self.name)


def linears(weights: Iterable[Weight]) -> Iterator[Linear]:
    """Yield the layers that can have adapters: every linear layer of the decoder but embedding, router and head. A tensor that
    holds all experts of a layer is none: adapters are saved beside modules, and it is not one."""
    for weight in weights:
        matrices = all(len(one) == 2 for one in weight.shapes) and weight.stack is None
        inner = weight.name.startswith("decoder.layers.") and ".router." not in weight.name
        if inner and matrices and weight.split in _CUT and weight.name.endswith(".weight"):
            parts = (
                Part(name.removesuffix(".weight"), *one)
                for name, one in zip(weight.hf, weight.shapes, strict=True)
            )
            yield Linear(weight.name.removesuffix(".weight"), weight.split, tuple(parts))


def fits(name: str, target: str) -> bool:
    """Return whether a target means a module: it is the whole name or its end after a dot, "*" being any text."""
    return target == ALL_LINEAR or fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def adapted(linear: Linear, lora: LoraShape) -> tuple[Part, ...]:
    """Return the parts that have adapters."""
    return tuple(part for part in linear.parts if any(fits(part.name, one) for one in lora.targets))


def check_targets(weights: Sequence[Weight], targets: Sequence[str]) -> None:
    """Raise UserError for a target that fits no linear layer, or some experts of a layer and not others."""
    layers = list(linears(weights))
    names = [part.name for layer in layers for part in layer.parts]
    modules = {name.removesuffix(".weight") for w in weights for name in w.hf} - set(names)
    for target in targets:
        if any(fits(name, target) for name in names):
            continue
        keys = ", ".join(dict.fromkeys(part.key for layer in layers for part in layer.parts))
        other = next((name for name in sorted(modules) if fits(name, target)), None)
        why = (
            f"it fits {other}, which is no linear layer with adapters" if other else "no module has that name"
        )
        raise UserError(
            f"{target!r}: {why}. Linear layers of this model are {keys}; all-linear means all of them"
        )
    chosen: dict[tuple[str, str], set[bool]] = {}
    for layer in layers:
        for part in layer.parts:
            on = any(fits(part.name, target) for target in targets)
            chosen.setdefault((layer.of_layer, part.key), set()).add(on)
    for (name, key), found in chosen.items():
        if len(found) > 1:
            raise UserError(
                f"{', '.join(targets)}: of {name} some experts' {key} would have adapters and some not; the experts of a "
                "layer are computed together, so write a pattern that fits all of them or none"
            )


def adapter_weights(weights: Iterable[Weight], lora: LoraShape) -> Iterator[Weight]:
    """Yield the table's entries of all adapters, in the order in which modules hold them, under peft's names."""
    for linear in linears(weights):
        parts, (a, b) = adapted(linear, lora), _CUT[linear.split]
        for part in parts:
            yield _entry(linear, part, "lora_A", (lora.rank, part.in_), a)
        for part in parts:
            yield _entry(linear, part, "lora_B", (part.out, lora.rank), b)


def _entry(linear: Linear, part: Part, which: str, shape: tuple[int, int], split: Split) -> Weight:
    hf = f"{PEFT_PREFIX}{part.name}.{which}.weight"
    return Weight(f"{linear.name}.{which}.{part.key}", (hf,), (shape,), split)


def is_adapter(name: str) -> bool:
    """Return whether a Hugging Face name is of an adapter."""
    return name.startswith(PEFT_PREFIX)


def adapter_parameters(weights: Iterable[Weight], lora: LoraShape) -> int:
    """Return how many numbers all adapters of a model have."""
    return sum(math.prod(one) for weight in adapter_weights(weights, lora) for one in weight.shapes)
