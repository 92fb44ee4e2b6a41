"""Low-rank adapters beside frozen linear layers, in every layout and with both back ends of layers.

`attach` freezes a model and gives each chosen linear layer parameters `lora_A.<part>` and `lora_B.<part>` and a forward
hook that adds scale · B A x to its output; names, shapes and cuts are those of `quintet.models.lora`. What travels between
tp ranks is A x, as wide as the rank, never the layer's input:

    column-parallel   A x of all tokens on every rank (gathered under SP), then this rank's rows of B
    row-parallel      each rank's A x is a share of the sum: summed (and scattered under SP), then all of B

A parameter that is whole on every rank gets, under SP, a gradient from the rank's tokens only, which core sums over tp
for those marked `sequence_parallel`. Experts' adapters are cut over etp; of the whole ones each rank has a share of the
gradient from its part of the expert, and `gradients.sum_over_etp` adds them up.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from quintet.engine.gradients import mark_etp_sum
from quintet.engine.layers.experts import group_rows, grouped_linear, mark_expert
from quintet.engine.weights.shards import Box, Shard
from quintet.models import ModelShape, table_of
from quintet.models.lora import PEFT_PREFIX, Linear, LoraShape, Part, adapted, is_adapter, linears


class Adapters:
    """The adapters of a model's chunk: what they are, and whether they are on."""

    def __init__(self, lora: LoraShape) -> None:
        self.lora, self.on = lora, True


def attach(model: Any, lora: LoraShape) -> None:
    """Freeze a chunk of the model and add adapters: parameters without meaning yet, see `start`.

    A value head, which has no use untrained, stays trained. The chunk's `adapters` says what it got.
    """
    model.requires_grad_(False)
    if hasattr(model, "value_head"):
        model.value_head.requires_grad_(True)
    model.adapters = Adapters(lora)
    if model.pre_process:
        # Recomputed layers have gradients only where an input has.
        model.embedding.register_forward_hook(requires_grad)
    layers = {layer.layer_number - 1: layer for layer in model.decoder.layers}
    seen = set()
    for linear in linears(table_of(model.shape)):
        number, inner = _place(linear.name)
        parts = adapted(linear, lora)
        if number not in layers or not parts or (number, inner) in seen:
            continue
        seen.add((number, inner))
        if linear.split.startswith("expert_"):
            _attach_experts(layers[number].mlp.experts, linear, inner.rpartition(".")[2], model)
        else:
            module = layers[number].get_submodule(inner)
            module.register_forward_hook(_Adapter(module, linear, model))


def _place(name: str) -> tuple[int, str]:
    """Layer number and path in the layer; the experts of a layer are one."""
    number, _, inner = name.removeprefix("decoder.layers.").partition(".")
    return int(number), re.sub(r"^mlp\.experts\.\d+\.", "mlp.experts.", inner)


def requires_grad(module: Any, arguments: Any, out: Tensor) -> Tensor:
    """Let gradients reach what a frozen embedding puts out, as a forward hook: recomputed layers have some only where an input has."""
    return out.requires_grad_() if torch.is_grad_enabled() else out


class _Adapter:
    """Forward hook of a linear layer whose weight is [out / tp, in], [out, in / tp] or whole."""

    def __init__(self, module: Any, linear: Linear, model: Any) -> None:
        self.adapters: Adapters = model.adapters
        self.linear, self.parts = linear, adapted(linear, self.adapters.lora)
        self.tp, self.sp = model.mesh.groups.tp, model.config.sequence_parallel
        self.shape: ModelShape = model.shape
        self._hold(module, model.config)
        if self._fuses_norm(module):
            module.return_layernorm_output = True  # what A multiplies

    def _hold(self, module: Any, config: Any) -> None:
        rank, tp, split = self.adapters.lora.rank, self.tp.size(), self.linear.split
        across = tp if split == "columns" else 1
        down = tp if split not in ("columns", "replicated") else 1
        kind: Any = {"dtype": config.params_dtype, "device": module.weight.device}
        module.lora_A = _parameters(self.parts, lambda part: torch.zeros(rank, part.in_ // across, **kind))
        module.lora_B = _parameters(self.parts, lambda part: torch.zeros(part.out // down, rank, **kind))
        for held, cut in ((module.lora_A, across > 1), (module.lora_B, down > 1)):
            for parameter in held.values():
                parameter.tensor_model_parallel = cut
                parameter.partition_dim, parameter.partition_stride = int(split == "columns"), 1
                parameter.sequence_parallel = self.sp and not cut

    @staticmethod
    def _fuses_norm(module: Any) -> bool:
        return hasattr(module, "return_layernorm_output")

    def __call__(self, module: Any, arguments: tuple[Tensor, ...], output: Any) -> tuple[Tensor, Any]:
        """Of the layer's (output, bias); where TransformerEngine fuses a norm, the norm's output is with them."""
        x, (out, *rest) = arguments[0], output
        if self._fuses_norm(module):
            if isinstance(out, tuple):
                out, x = out
            else:
                x = rest.pop()
        bias = rest[0] if rest else None
        if not self.adapters.on:
            return out, bias
        low = self._shared(F.linear(x, torch.cat(list(module.lora_A.values()))))
        b = self._beside(list(module.lora_B.values()))
        scale = self.adapters.lora.scale
        flat = torch.addmm(out.flatten(0, -2), low.flatten(0, -2), b.t(), alpha=scale)
        return flat.view(out.shape), bias

    def _shared(self, low: Tensor) -> Tensor:
        """A x as B needs it: [tokens, 1, parts · rank]."""
        if self.linear.split == "replicated" or self.tp.size() == 1:
            return low
        if self.linear.split == "columns":
            if self.sp:
                return reduce_scatter_to_sequence_parallel_region(low, group=self.tp)
            return reduce_from_tensor_model_parallel_region(low, group=self.tp)
        if self.sp:
            return gather_from_sequence_parallel_region(low, group=self.tp)
        return copy_to_tensor_model_parallel_region(low, group=self.tp)

    def _beside(self, held: list[Tensor]) -> Tensor:
        """[out here, parts · rank]: each part's B in its rows of the layer's output and its columns of A x."""
        wide = _in_columns(held)
        by_part = dict(zip(self.parts, wide, strict=True))
        if self.linear.split != "qkv":
            # Gate and up have as many rows: for the one without adapters.
            nothing = torch.zeros_like(wide[0])
            return torch.cat([by_part.get(p, nothing) for p in self.linear.parts])
        groups, d = self.shape.kv_heads // self.tp.size(), self.shape.head_dim
        heads = [
            by_part[p].view(groups, -1, d, wide[0].shape[1])
            if p in by_part
            else wide[0].new_zeros(groups, p.out // self.shape.kv_heads // d, d, wide[0].shape[1])
            for p in self.linear.parts
        ]
        return torch.cat(heads, dim=1).flatten(0, 2)


def _in_columns(held: Sequence[Tensor]) -> list[Tensor]:
    """[..., out, rank] each → [..., out, n · rank] with zeros but in its own columns."""
    rank, n = held[0].shape[-1], len(held)
    return [F.pad(b, (i * rank, (n - 1 - i) * rank)) for i, b in enumerate(held)]


def _parameters(parts: Iterable[Part], made: Callable[[Part], Tensor]) -> torch.nn.ParameterDict:
    """In the order of the parts: torch sorts a plain dict."""
    return torch.nn.ParameterDict(OrderedDict((part.key, torch.nn.Parameter(made(part))) for part in parts))


def _attach_experts(experts: Any, linear: Linear, name: str, model: Any) -> None:
    """name: linear_fc1 or linear_fc2. TransformerEngine has a grouped layer of that name; the portable experts get a module
    that only holds parameters, and call the adapter themselves."""
    layer = getattr(experts, name, None)
    if layer is None:
        layer = torch.nn.Module()
        setattr(experts, name, layer)
        experts.after[name] = _ExpertAdapter(layer, experts.weight1, linear, model)
    else:
        adapter = _ExpertAdapter(layer, next(layer.parameters()), linear, model)
        layer.register_forward_hook(
            lambda module, arguments, output: (adapter(arguments[0], output[0], arguments[1]), *output[1:])
        )


class _ExpertAdapter:
    """Adapters of one grouped product of a rank's experts: A [experts, rank, in], B [experts, out, rank], a part each."""

    def __init__(self, layer: Any, like: Tensor, linear: Linear, model: Any) -> None:
        self.layer, self.linear = layer, linear
        self.adapters: Adapters = model.adapters
        self.parts = adapted(linear, self.adapters.lora)
        groups, rank = model.mesh.groups, self.adapters.lora.rank
        here, etp = model.config.num_moe_experts // groups.ep.size(), groups.expt_tp.size()
        first = linear.split == "expert_gate_up"
        kind: Any = {"dtype": like.dtype, "device": like.device}
        across, down = (1, etp) if first else (etp, 1)
        layer.lora_A = _parameters(self.parts, lambda p: torch.zeros(here, rank, p.in_ // across, **kind))
        layer.lora_B = _parameters(self.parts, lambda p: torch.zeros(here, p.out // down, rank, **kind))
        for held, whole in ((layer.lora_A, first), (layer.lora_B, not first)):
            for parameter in held.values():
                mark_expert(parameter, groups, dim=1 if first else 2)
                if whole and etp > 1:
                    mark_etp_sum(parameter, groups)

    def __call__(self, x: Tensor, out: Tensor, counts: Tensor | list[int]) -> Tensor:
        """x: [T, in] sorted by expert, out: [T, out here], counts: of each expert's rows."""
        if not self.adapters.on:
            return out
        a = torch.cat(list(self.layer.lora_A.values()), dim=1)
        wide = _in_columns(list(self.layer.lora_B.values()))
        by_part = dict(zip(self.parts, wide, strict=True))
        b = torch.cat([by_part.get(p, torch.zeros_like(wide[0])) for p in self.linear.parts], dim=1)
        rows = group_rows(counts, x.device, a, b)
        low = grouped_linear(x, a, rows)
        return out + grouped_linear(low * self.adapters.lora.scale, b, rows)


@contextmanager
def disable_adapters(chunks: Iterable[Any]) -> Iterator[None]:
    """Use a model without its adapters within the context. Nothing happens to a model that has none."""
    found = [chunk.adapters for chunk in chunks if chunk.adapters is not None]
    for one in found:
        one.on = False
    try:
        yield
    finally:
        for one in found:
            one.on = True


def start(shards: Iterable[Shard], seed: int) -> None:
    """Start fresh adapters, as peft makes them: A uniform (Kaiming, a = √5), B zero. The same in every layout."""
    for shard in shards:
        if ".lora_B." in shard.name:
            shard.write(torch.zeros(shard.box_shape))
            continue
        digest = hashlib.blake2b(f"{seed}/{shard.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        bound = shard.shape[1] ** -0.5
        full = torch.empty(shard.shape).uniform_(-bound, bound, generator=generator)
        shard.write(full[tuple(slice(*ends) for ends in shard.box)])


def split_adapters(shards: Iterable[Shard]) -> tuple[list[Shard], list[Shard]]:
    """Return the shards of the model itself, and those of its adapters."""
    base: list[Shard] = []
    low_rank: list[Shard] = []
    for shard in shards:
        (low_rank if is_adapter(shard.name) else base).append(shard)
    return base, low_rank


def merged(shards: Iterable[Shard], lora: LoraShape) -> list[Shard]:
    """Return the model's shards with the adapters in them, W + scale · B A. A rank needs no other's: it holds the rows of B and columns
    of A that its part of a weight takes. Nothing is computed before it is read."""

    def with_adapters(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return weight.add((b @ a).view(weight.shape), alpha=lora.scale)

    base, low_rank = split_adapters(shards)
    held = {shard.name.removeprefix(PEFT_PREFIX): shard for shard in low_rank}
    found = []
    for shard in base:
        module = shard.name.removesuffix(".weight")
        a, b = (held.get(f"{module}.lora_{x}.weight") for x in "AB")
        found.append(shard if a is None or b is None else ComputedShard(with_adapters, shard, a, b))
    return found


def scaled(low_rank: Iterable[Shard], scale: float) -> list[Shard]:
    """Return the shards of adapters with their scale in B, so that B A is all that is added. Nothing is computed before it is
    read."""
    return [ComputedShard(lambda b: b * scale, one) if ".lora_B." in one.name else one for one in low_rank]


class ComputedShard(Shard):
    """A shard whose view is computed in fp32 each time it is asked for, of `base` and of others beside it; it has the size and the type
    of base's."""

    standing = False

    def __init__(self, compute: Callable[..., Tensor], base: Shard, *others: Shard) -> None:
        self.name, self.shape, self.box, self.trained = base.name, base.shape, base.box, base.trained
        self._compute, self._read = compute, (base.view, *(one.view for one in others))

    @property
    def view(self) -> Tensor:  # type: ignore[override]
        dtype = self._read[0].dtype
        exact = torch.promote_types(dtype, torch.float32)
        return self._compute(*(one.to(exact) for one in self._read)).to(dtype)

    @property
    def behind(self) -> tuple[Tensor, ...]:
        """The tensors that are read (`Shard.behind`)."""
        return self._read

    def unit(self, dim: int = 0) -> int:
        """Return the size of one step as `Shard.unit`; nothing is computed."""
        return Shard(self.name, self.shape, self.box, self._read[0]).unit(dim)

    def part(self, box: Box) -> Tensor:
        """Return the view of a box as `Shard.part`; computed once."""
        return Shard(self.name, self.shape, self.box, self.view).part(box)
