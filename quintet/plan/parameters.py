"""Which parameters a rank holds, and how megatron-core lays them out for gradients and optimizer state.

The family's table of weights says what there is and how it is cut. With the distributed optimizer, core 0.16.1
(`_ParamAndGradBuffer`) puts a chunk's parameters into one flat buffer, the last first: each begins at a multiple of 64
elements, each bucket ends at a multiple of 128 and of the ranks that share it, and each of those ranks owns an equal
part of every bucket. An embedding that is on two stages has a bucket of its own. Experts that are spread over other
ranks than the rest have buffers of their own.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from quintet.models import ModelShape, Weight, table_of
from quintet.models.lora import LoraShape, adapter_weights
from quintet.plan.setup import Place, Setup
from quintet.recipe.weight_patterns import is_frozen

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.\d+\.linear_fc(\d)\.")
BUCKET_ELEMENTS = 40_000_000
"""Of gradients that are reduced in the backward pass, at least; megatron-core's own number."""


@dataclass(frozen=True)
class Parameter:
    """A parameter on one rank. shared: an embedding that is on two stages. trained: with adapters, most are frozen."""

    name: str
    numel: int
    expert: bool = False
    shared: bool = False
    trained: bool = True


@dataclass(frozen=True)
class Flat:
    """A flat buffer: elements with padding, and the part of its parameters' elements that one sharing rank owns."""

    numel: int
    owned: int


def chunks(setup: Setup, stage: int) -> list[list[Parameter]]:
    """Return the parameters of each of a stage's chunks (layout.vpp of them), in the order in which its modules hold them."""
    shape, layout = setup.shape, setup.layout
    weights, frozen = sorted_weights(shape), _frozen(setup)
    found = []
    for part, layers in enumerate(layout.layers_of(shape.layers, stage)):
        begins = stage == 0 and part == 0
        ends = stage == setup.last and part == layout.vpp - 1
        held = [
            replace(one, trained=False) if one.name in frozen else one
            for one in _of_chunk(setup, weights, layers, begins, ends)
        ]
        beside = [weight for number in layers for weight in weights.layers.get(number, [])]
        found.append(held if setup.lora is None else list(_with_adapters(setup, setup.lora, held, beside)))
    return found


def _frozen(setup: Setup) -> set[str]:
    """Names of the parameters that `optimizer.frozen` keeps from being trained."""
    patterns = setup.optimizer.frozen if setup.optimizer is not None else []
    if not patterns:
        return set()
    found = {_in_stack(weight.name) for weight in table_of(setup.shape) if is_frozen(weight.hf[0], patterns)}
    tied = setup.shape.tied_embeddings and "embedding.word_embeddings.weight" in found
    return found | ({"output_layer.weight"} if tied else set())


def _in_stack(name: str) -> str:
    """The name of the parameter of all experts that an expert's weight is in; any other name as it is."""
    return _EXPERT.sub(r"mlp.experts.*.linear_fc\1.", name)


@dataclass(frozen=True)
class Sorted:
    """The trained weights of a model: of each decoder layer, of those for multi-token prediction, and the others."""

    layers: dict[int, list[Weight]]
    ahead: list[Weight]
    others: list[Weight]


@functools.lru_cache(maxsize=1)
def sorted_weights(shape: ModelShape) -> Sorted:
    """Return where the trained weights of a model are. Sorted once for all stages: the table of a large model is long."""
    found = Sorted({}, [], [])
    for weight in table_of(shape):
        if not weight.trained:
            continue
        if layer := _LAYER.match(weight.name):
            found.layers.setdefault(int(layer[1]), []).append(weight)
        elif weight.name.startswith("mtp."):
            found.ahead.append(weight)
        else:
            found.others.append(weight)
    return found


def _with_adapters(
    setup: Setup, lora: LoraShape, held: Sequence[Parameter], weights: Sequence[Weight]
) -> Iterator[Parameter]:
    """A chunk's parameters, frozen but for a value head, each linear layer's with its adapters after it."""
    beside: dict[str, dict[str, int]] = {}
    experts = setup.layout.ep
    for weight in adapter_weights(weights, lora):
        linear, _, which = weight.name.partition(".lora_")
        numels = beside.setdefault(_in_stack(f"{linear}."), {})
        numels[which] = numels.get(which, 0) + _numel(setup, weight)
    waiting: list[Parameter] = []  # the experts' adapters come after both of their matrices
    for parameter in held:
        if not parameter.expert:
            yield from waiting
            waiting = []
        yield replace(parameter, trained=parameter.name == "value_head.weight")
        found = beside.get(parameter.name.removesuffix("weight"), {})
        for which, numel in found.items():
            share = numel // experts if parameter.expert else numel
            adapter = Parameter(f"{parameter.name}.lora_{which}", share, expert=parameter.expert)
            if parameter.expert:
                waiting.append(adapter)
            else:
                yield adapter
    yield from waiting


def _of_chunk(setup: Setup, weights: Sorted, layers: range, begins: bool, ends: bool) -> Iterator[Parameter]:
    shape = setup.shape
    twice = shape.tied_embeddings and setup.layout.pp > 1
    copied = bool(weights.ahead) and setup.layout.pp > 1 and not twice
    embedding, *others = weights.others
    if begins:
        yield Parameter(embedding.name, _numel(setup, embedding), shared=twice or copied)
    for number in layers:
        yield from _of_layer(setup, weights.layers.get(number, []))
    if not ends:
        return
    for weight in others:
        yield Parameter(weight.name, _numel(setup, weight))
    if twice:
        yield Parameter("output_layer.weight", _numel(setup, embedding), shared=True)
    # Layers for multi-token prediction read an embedding on their own stage.
    for _, of_depth in itertools.groupby(weights.ahead, lambda weight: weight.name.split(".")[2]):
        for one in _of_layer(setup, list(of_depth)):
            yield replace(one, trained=setup.depths > 0)
    if copied:
        yield Parameter(embedding.name, _numel(setup, embedding), shared=True)


def _of_layer(setup: Setup, weights: list[Weight]) -> Iterator[Parameter]:
    """core builds grouped-query attention from its end, and all experts' matrices and biases are a parameter each."""
    if not setup.shape.mla:
        weights = sorted(weights, key=lambda weight: _rank_in_layer(weight.name))
    for expert, run in itertools.groupby(weights, lambda weight: bool(_EXPERT.search(weight.name))):
        held: Counter[str] = Counter()
        for weight in run:
            held[_in_stack(weight.name)] += _numel(setup, weight)
        for name, numel in held.items():
            yield Parameter(name, numel // setup.layout.ep if expert else numel, expert)


def _rank_in_layer(name: str) -> int:
    if ".input_layernorm." in name:
        return 0
    if ".core_attention." in name:
        return 1
    return 2 if "self_attention.linear_proj." in name else 3


def _numel(setup: Setup, weight: Weight) -> int:
    """Elements of a weight on one rank; of an expert's, as if every rank held all experts."""
    total = weight.elements
    if weight.split in ("replicated", "expert_replicated"):
        return total
    if weight.split == "vocab":
        rows, columns = weight.shapes[0]
        return -(-rows // setup.layout.tp) * columns
    return total // (setup.etp if weight.split.startswith("expert_") else setup.layout.tp)


def buffers(setup: Setup, place: Place, parts: list[list[Parameter]]) -> list[Flat]:
    """Return flat buffers of a rank that trains. parts: its chunks."""
    found = []
    dp = setup.dp_cp // setup.layout.cp
    # Core cuts none on later stages, whose reduction ends while the first one computes.
    bucket = bucket_elements(dp) if setup.engine.overlap_grad_reduce and place.pp == 0 else math.inf
    for held in parts:
        parameters = [p for p in held if p.trained]
        apart = [p for p in parameters if p.expert and setup.own_expert_groups]
        rest = [p for p in parameters if not (p.expert and setup.own_expert_groups)]
        index = place.dp * setup.layout.cp + place.cp
        for group, ranks, at in ((rest, setup.dp_cp, index), (apart, setup.edp, place.edp)):
            if group:
                found.append(_flat(group, ranks, at, setup.engine.distributed_optimizer, bucket))
    return found


def bucket_elements(dp: int) -> int:
    """Return the elements from which on a bucket of gradients that are reduced in the backward pass is full."""
    return max(BUCKET_ELEMENTS, 1_000_000 * dp)


def _flat(parameters: Sequence[Parameter], ranks: int, index: int, distributed: bool, bucket: float) -> Flat:
    if not distributed:
        total = sum(p.numel for p in parameters)
        return Flat(total, total)
    starts: list[tuple[int, int]] = []  # (start, stop) of the present bucket's parameters
    begin, end, owned = 0, 0, 0

    def close() -> None:
        nonlocal begin, end, owned, starts
        end = _up(end, math.lcm(ranks, 128))
        part = (end - begin) // ranks
        low, high = begin + index * part, begin + (index + 1) * part
        owned += sum(max(0, min(stop, high) - max(start, low)) for start, stop in starts)
        begin, starts = end, []

    for parameter in reversed(parameters):
        if parameter.shared and starts:
            close()
        start = _up(end, 64)
        end = start + parameter.numel
        starts.append((start, end))
        if parameter.shared or end - begin >= bucket:
            close()
    if starts:
        close()
    return Flat(end, owned)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
