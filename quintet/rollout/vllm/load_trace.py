"""Where each element of a Hugging Face tensor lands in vLLM's parameters, seen while vLLM loads it.

vLLM's loaders know how a model's layers are fused, cut over ranks, padded and renamed; there is one of them a model and a
kind of layer. Instead of writing all that down again, a load is watched: every copy from a tensor that arrived into a
parameter says which box of the one is which box of the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quintet.engine.weights.fingerprint import fingerprint
from quintet.models.mcore import Box, box_sizes, meet, volume, whole_box


@dataclass(frozen=True)
class Region:
    """The place of a part: `box` of the Hugging Face tensor `name` (of `shape`) is `held` of the parameter `parameter`.

    dims: for each dim of `box` longer than one, the parameter's dim it lies along; None for the others. dtype: what it
    arrived in; kept: what the parameter has.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    parameter: str
    held: Box
    dims: tuple[int | None, ...]
    dtype: torch.dtype
    kept: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether the parameter's type holds every bit of what arrived."""
        return torch.promote_types(self.dtype, self.kept) == self.kept

    def view(self, parameter: Tensor) -> Tensor:
        """Return the region in a tensor of the parameter's shape, with the dims of `box`."""
        offset = parameter.storage_offset() + sum(
            start * step for (start, _), step in zip(self.held, parameter.stride(), strict=True)
        )
        sizes = box_sizes(self.box)
        steps = [1 if d is None else parameter.stride(d) for d in self.dims]
        return torch.as_strided(parameter, sizes, steps, offset)


@dataclass
class Record:
    """What a watched load did, by the model's own names of parameters.

    regions: of each Hugging Face tensor that a copy was seen of; copied: their boxes by parameter. mixed: tensors that
    something was computed from, and computed: the parameters that it went to. filled: parts of parameters that a loader set to a
    number (padding). arrived: fingerprint of each region's content as it arrived. loaded: shape and type of the
    parameters at that time.
    """

    regions: dict[str, dict[Region, None]] = field(default_factory=lambda: defaultdict(dict))
    copied: dict[str, set[Box]] = field(default_factory=lambda: defaultdict(set))
    mixed: set[str] = field(default_factory=set)
    filled: dict[str, dict[tuple[Box, float], None]] = field(default_factory=lambda: defaultdict(dict))
    arrived: dict[Region, Tensor] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)
    loaded: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)

    def unwritten(self, parameter: str) -> tuple[int, int]:
        """Return how many of a parameter's elements the load did not write, and how many it has. What is computed counts as all."""
        elements = math.prod(self.loaded[parameter][0])
        if parameter in self.computed:
            return 0, elements
        boxes = self.copied[parameter] | {box for box, _ in self.filled.get(parameter, ())}
        if sum(map(volume, boxes)) > elements:  # filled first, and copied over
            boxes = {box for box in boxes if not any(box != one and meet(box, one) == box for one in boxes)}
        return elements - sum(map(volume, boxes)), elements


@dataclass(frozen=True)
class _Tensor:
    """A tensor that is followed: its geometry, and for each of its dims the dim of the Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]
    box: Box
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int
    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class _Part:
    """A view within a tensor: its box there, and for each dim of the view the tensor's dim (None where it is one long)."""

    box: Box
    dims: tuple[int | None, ...]


def part_of(view: Tensor, sizes: Sequence[int], steps: Sequence[int], offset: int) -> _Part | None:
    """Return where a view lies in a tensor of this geometry; None where it is no box of it."""
    rest = int(view.storage_offset()) - offset
    if rest < 0:
        return None
    starts = [0] * len(sizes)
    for dim in sorted(range(len(sizes)), key=lambda d: -steps[d]):
        if sizes[dim] > 1 and steps[dim]:
            starts[dim], rest = divmod(rest, steps[dim])
    lengths, dims = [1] * len(sizes), list[int | None]()
    for size, step in zip(view.shape, view.stride(), strict=True):
        along = [d for d in range(len(sizes)) if sizes[d] > 1 and steps[d] == step and lengths[d] == 1]
        if size > 1 and not along:
            return None
        dims.append(along[0] if size > 1 else None)
        if size > 1:
            lengths[along[0]] = size
    if rest or any(s + n > size for s, n, size in zip(starts, lengths, sizes, strict=True)):
        return None
    return _Part(tuple((s, s + n) for s, n in zip(starts, lengths, strict=True)), tuple(dims))


class Trace(TorchDispatchMode):
    """Watches the loading of the tensors it is told to `copy_weights_from` into the parameters and buffers of a model.

    named: all parameters and buffers of the model at this moment, by name: loading may replace them.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        super().__init__()
        self.record = Record()
        self._named = named
        # By storage. A weak reference keeps the storage's address from being used again, not its memory.
        self._followed: dict[int, tuple[StorageWeakRef, _Tensor | frozenset[str]]] = {}
        self._parameters: dict[int, tuple[StorageWeakRef, str, _Tensor]] = {}

    def follow(self, name: str, tensor: Tensor) -> None:
        """Record copies of this tensor from now on; it is the whole of `name` and alone in its storage."""
        shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
        dims = tuple(range(len(shape)))
        self._keep(tensor, _Tensor(name, shape, whole_box(shape), shape, tensor.stride(), offset, dims))

    def _keep(self, tensor: Tensor, what: _Tensor | frozenset[str]) -> None:
        storage = tensor.untyped_storage()
        self._followed[storage._cdata] = (StorageWeakRef(storage), what)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Before it runs: an operator may write into what it reads.
        sources = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and self._origin(t)]
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::copy_":
            self._copied(args[0], args[1])
        elif name in ("aten::fill_", "aten::zero_"):
            self._set(args[0], float(args[1]) if len(args) > 1 else 0.0)
        elif name in ("aten::_to_copy", "aten::clone"):
            self._cloned(args[0], result)
        else:
            self._computed(sources, result, args[0] if func._schema.is_mutable else None)
        return result

    def _origin(self, tensor: Tensor) -> _Tensor | frozenset[str] | None:
        if tensor.is_meta:
            return None
        found = self._followed.get(tensor.untyped_storage()._cdata)
        return found[1] if found and not found[0].expired() else None

    def _names(self, tensor: Tensor) -> frozenset[str]:
        origin = self._origin(tensor)
        return origin if isinstance(origin, frozenset) else frozenset({origin.name} if origin else ())

    def _parameter(self, tensor: Tensor) -> tuple[str, _Tensor] | None:
        """The parameter that a tensor is a view of."""
        if tensor.is_meta:
            return None
        key = tensor.untyped_storage()._cdata
        found = self._parameters.get(key)
        if found is None or found[0].expired():
            self._parameters = {}
            for name, p in self._named():
                if not p.is_meta and p.numel():
                    shape = tuple(p.shape)
                    place = _Tensor(name, shape, (), shape, p.stride(), int(p.storage_offset()), ())
                    storage = p.untyped_storage()
                    self._parameters.setdefault(storage._cdata, (StorageWeakRef(storage), name, place))
            found = self._parameters.get(key)
        return (found[1], found[2]) if found else None

    def _copied(self, target: Tensor, source: Tensor) -> None:
        origin = self._origin(source) if isinstance(source, Tensor) else None
        if origin is None or target.is_meta:
            return
        found = self._parameter(target)
        if found is None:  # into something in between
            self._keep(target, self._names(source))
            return
        name, place = found
        self.record.loaded[name] = (place.sizes, target.dtype)
        copied = None if isinstance(origin, frozenset) else _region(origin, source, name, place, target)
        if copied is None:
            self._write_computed(self._names(source), name)
            return
        region, part = copied
        self.record.regions[region.name][region] = None
        self.record.copied[name].add(region.held)
        self.record.arrived[region] = fingerprint(part, region.shape, region.box)

    def _set(self, target: Tensor, value: float) -> None:
        found = None if target.is_meta else self._parameter(target)
        if found:
            part = part_of(target, found[1].sizes, found[1].steps, found[1].offset)
            if part and volume(part.box):
                self.record.filled[found[0]][part.box, value] = None
        elif names := self._names(target):  # so do all ranks of gpt-oss but the first with a bias
            self._keep(target, names)

    def _cloned(self, source: Tensor, result: Tensor) -> None:
        """A copy in its own memory is followed as well."""
        origin = self._origin(source)
        if origin is None or result.is_meta or result.untyped_storage()._cdata in self._followed:
            return
        if isinstance(origin, frozenset):
            self._keep(result, origin)
            return
        part = part_of(source, origin.sizes, origin.steps, origin.offset)
        if part is None or source.dtype != result.dtype:
            self._keep(result, frozenset({origin.name}))
            return
        box, offset = _hf_box(origin, part), int(result.storage_offset())
        dims = tuple(None if d is None else origin.dims[d] for d in part.dims)
        made = _Tensor(origin.name, origin.shape, box, tuple(result.shape), result.stride(), offset, dims)
        self._keep(result, made)

    def _computed(self, sources: list[Tensor], result: Any, target: Any) -> None:
        """Anything else that is made of followed tensors is known to be, and no more. target: what the operator wrote to."""
        names = frozenset[str]().union(*map(self._names, sources)) if sources else frozenset[str]()
        if not names:
            return
        found = self._parameter(target) if isinstance(target, Tensor) else None
        if found is not None:
            self.record.loaded[found[0]] = (found[1].sizes, target.dtype)
            self._write_computed(names, found[0])
            return
        made = tree_leaves((result, target))
        for tensor in (t for t in made if isinstance(t, Tensor) and not t.is_meta):
            if target is not None or not self._origin(tensor):  # a view is followed as what it is a view of
                self._keep(tensor, names)

    def _write_computed(self, names: frozenset[str], parameter: str) -> None:
        self.record.mixed |= names
        self.record.computed.add(parameter)


def _hf_box(origin: _Tensor, part: _Part) -> Box:
    """The box of the Hugging Face tensor that a part of a followed one is."""
    box = list(origin.box)
    for (start, stop), dim in zip(part.box, origin.dims, strict=True):
        if dim is not None:
            first = origin.box[dim][0]
            box[dim] = (first + start, first + stop)
    return tuple(box)


def _region(
    origin: _Tensor, source: Tensor, name: str, place: _Tensor, target: Tensor
) -> tuple[Region, Tensor] | None:
    """What a copy of `source` into `target`, a view of a parameter, tells, and the source with its dims in the order of the Hugging Face
    tensor's; None where it is no copy of box to box."""
    read = part_of(source, origin.sizes, origin.steps, origin.offset)
    write = part_of(target, place.sizes, place.steps, place.offset)
    if read is None or write is None or source.shape != target.shape:
        return None
    box = _hf_box(origin, read)
    dims: list[int | None] = [None] * len(box)
    steps = [1] * len(box)
    for a, b, step in zip(read.dims, write.dims, source.stride(), strict=True):
        if a is not None:
            dim = origin.dims[a]
            assert dim is not None  # a dim longer than one is a dim of the Hugging Face tensor
            dims[dim], steps[dim] = b, step
    region = Region(origin.name, origin.shape, box, name, write.box, tuple(dims), source.dtype, target.dtype)
    return region, torch.as_strided(source, box_sizes(box), steps, source.storage_offset())
