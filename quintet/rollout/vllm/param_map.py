"""The live weights of a model inside vLLM, as parts of Hugging Face tensors: where they are, and how they are read and written.

A first load is watched (`load_trace`); from then on it is known which box of which tensor is where in which parameter. What
vLLM makes of its parameters once they are loaded differs by layer, device and kernel. Each parameter has a form in which it
can be read, or none:

- plain: it is as it was loaded, or has its last two dims exchanged. It can be written in place as well;
- anything else, such as matrices shuffled for a kernel or packed for one on the CPU, cannot be read.

Linear layers, embeddings, norms and routers are known to be plain on GPUs, and those whose kernels have their own copies on the CPU
are known. Experts and quantised layers may be anything, so they have a form only if what arrived is read back with it after the
first load. The proof of what has none are log-probs (`quintet.sync.logprob_probe`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.engine.weights.fingerprint import fingerprint, fingerprints
from quintet.errors import SyncMismatch
from quintet.models.mcore import Box, meet, slices, volume, whole_box
from quintet.rollout.base import Fingerprints, Piece
from quintet.rollout.vllm.load_trace import Record, Region
from quintet.rollout.vllm.worker_models import WorkerModels

TRIED = 4
"""Regions of a parameter that are read to find its form."""


@dataclass(frozen=True)
class Form:
    """How a parameter is kept. read: its content, in the shape it was loaded in. plain: whether that is the parameter itself, so
    that writing to it changes the model."""

    read: Callable[[], Tensor]
    plain: bool


class Live:
    """The map of one worker's live weights. record: of a load that has just ended; models: those it loaded."""

    def __init__(self, record: Record, models: WorkerModels) -> None:
        self.regions = {name: list(regions) for name, regions in record.regions.items()}
        self._models = models
        self._filled = {name: list(parts) for name, parts in record.filled.items()}
        self._of = defaultdict[str, list[Region]](list)
        for regions in self.regions.values():
            for region in regions:
                self._of[region.parameter].append(region)
        self._forms = {
            name: _form(models, *models.owner(name), *record.loaded[name], regions, record.arrived)
            for name, regions in self._of.items()
        }
        self._mixed = set(record.mixed)
        self.unreadable = record.mixed | {
            name
            for name, regions in self.regions.items()
            if any(self._forms[r.parameter] is None or not r.exact for r in regions)
        }
        self.copyable = not record.mixed and all(form and form.plain for form in self._forms.values())

    def boxes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Box]]:
        """Return the parts of tensors that the load read, by name; they do not overlap. shapes: of all tensors that came."""
        found = {}
        for name in {*self.regions, *self._mixed}:
            parts = sorted({r.box for r in self.regions.get(name, ())})
            apart = all(meet(*pair) is None for pair in itertools.combinations(parts, 2))
            whole = name in self._mixed or not apart
            found[name] = [whole_box(shapes[name])] if whole else parts
        return found

    def read(self) -> tuple[Fingerprints, set[str]]:
        """Return fingerprints of all that can be read; and the names of tensors that cannot, or not in every copy that is used.

        Raises SyncMismatch where two copies of a part differ.
        """
        unreadable = set(self.unreadable)
        for layer, copies in _absorbed(self._models):
            names = self._names_in(layer)
            if copies is None:
                unreadable |= names
            elif not all(torch.equal(*pair) for pair in copies):
                raise SyncMismatch(f"{', '.join(sorted(names))}: the copy that attention works with differs")
        return fingerprints(self._parts()), unreadable

    def _parts(self) -> Iterator[tuple[str, tuple[int, ...], Box, Tensor]]:
        for parameter, regions in self._of.items():
            form = self._forms[parameter]
            if form is None:
                continue
            tensor = form.read()
            for region in regions:
                if region.name not in self.unreadable:
                    yield region.name, region.shape, region.box, self._as_it_came(region, tensor)

    def _as_it_came(self, region: Region, parameter: Tensor) -> Tensor:
        """A part in the type it arrived in. Raises SyncMismatch where it is nothing that arrived in that."""
        part = region.view(parameter)
        narrow = part.to(region.dtype)
        if region.dtype != region.kept and not torch.equal(narrow.to(region.kept), part):
            raise SyncMismatch(
                f"{region.name}: vLLM holds values that are no {region.dtype}, as the engine's are"
            )
        return narrow

    def _names_in(self, layer: Any) -> set[str]:
        held = {name + "." for name, module in self._models.named_modules() if module is layer}
        return {
            r.name for p, regions in self._of.items() if p.rpartition(".")[0] + "." in held for r in regions
        }

    def begin(self) -> Copying:
        """Start to write new weights in place, where all are `copyable`."""
        targets = {
            name: [(r, r.view(self._forms[r.parameter].read())) for r in regions]  # type: ignore[union-attr]
            for name, regions in self.regions.items()
        }
        for parameter, parts in self._filled.items():
            form = self._forms.get(parameter)
            for box, value in parts if form else ():
                form.read()[tuple(slice(*side) for side in box)].fill_(value)  # type: ignore[union-attr]
        return Copying(targets)

    def end(self) -> None:
        """Renew in place what layers derive from their weights, after new ones were written."""
        for _, copies in _absorbed(self._models):
            for copy, source in copies or ():
                if copy.data_ptr() != source.data_ptr():
                    copy.copy_(source)


class Copying:
    """New weights on their way into live parameters."""

    def __init__(self, targets: dict[str, list[tuple[Region, Tensor]]]) -> None:
        self._targets = targets
        self._left = {name: sum(volume(r.box) for r, _ in parts) for name, parts in targets.items()}

    def places(self, piece: Piece) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield where the model has something of a piece, and what."""
        for region, view in self._targets.get(piece.name, ()):
            if region.box == piece.box:
                self._left[piece.name] -= volume(piece.box)
                yield view, piece.tensor
            elif (both := meet(region.box, piece.box)) is not None:
                self._left[piece.name] -= volume(both)
                yield view[slices(region.box, both)], piece.tensor[slices(piece.box, both)]

    def missing(self) -> list[str]:
        """Return tensors that did not come, or not all of them."""
        return sorted(name for name, left in self._left.items() if left > 0)


def _holds(module: Any, attribute: str, layer: Any) -> bool:
    """Whether a module is the layer, or shares this parameter with it."""
    return module is layer or getattr(module, attribute, None) is getattr(layer, attribute)


def _form(
    models: WorkerModels,
    layer: Any,
    attribute: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    regions: list[Region],
    arrived: dict[Region, Tensor],
) -> Form | None:
    """The form of a parameter that was loaded with this shape and type; None where it cannot be read."""
    holders = [m for _, m in models.named_modules() if _holds(m, attribute, layer)]
    if attribute == "weight" and any(map(_packs, holders)):
        return None  # what computes is the kernel's copy, also where the parameter is there as well (of embeddings)
    held = getattr(layer, attribute)
    # What quantised layers derive from their parameters is not known here.
    writable = held.dtype == dtype and (_quantisation(layer) or "Unquantized").startswith("Unquantized")
    forms = []
    if tuple(held.shape) == shape:
        forms.append(Form(lambda: getattr(layer, attribute).data.to(dtype), writable))
    if held.dim() >= 2 and tuple(held.mT.shape) == shape:
        forms.append(Form(lambda: getattr(layer, attribute).data.mT.to(dtype), writable))
    tried = [r for r in regions if r.exact][:: max(1, len(regions) // TRIED)]
    for form in forms:
        tensor = form.read()
        if any(
            torch.equal(fingerprint(r.view(tensor).to(r.dtype), r.shape, r.box), arrived[r]) for r in tried
        ):
            return form
    # What is known to be plain and does not read back is wrong, and is to be found so.
    return forms[0] if forms and _sure(layer) and tuple(held.shape) == shape else None


def _sure(layer: Any) -> bool:
    """Whether a layer is known to keep its parameters as they were loaded, on GPUs."""
    return _quantisation(layer) in (None, "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def _quantisation(layer: Any) -> str | None:
    """What vLLM calls the way in which a layer keeps its weights."""
    method = getattr(layer, "quant_method", None)
    return None if method is None else type(method).__name__


def _packs(layer: Any) -> bool:
    """Whether a layer's kernel on the CPU has its own copy of the weight, in a form of oneDNN's."""
    linear = torch.nn.functional.linear
    # Its own: what wraps a layer shows the layer's.
    return vars(layer).get("cpu_linear", linear) is not linear


def _absorbed(models: WorkerModels) -> Iterator[tuple[Any, list[tuple[Tensor, Tensor]] | None]]:
    """Layers of which attention works with its own copies (of kv_b_proj, if it is latent; of sinks, if FlashInfer computes it): the layer,
    and the copies, each with what it is to be: None where that takes arithmetic (quantised weights)."""
    module: Any
    for _, module in models.named_modules():
        sinks = getattr(module, "sinks", None)
        if sinks is not None and (own := module.attn.impl.sinks) is not sinks:
            yield module, [(own, sinks.detach().to(own.dtype))]
        up = getattr(module, "W_UV", None)
        if up is None or getattr(module, "W_UK_T", None) is None:
            continue
        weight = module.kv_b_proj.weight
        if not _sure(module.kv_b_proj) or weight.dtype != up.dtype:
            yield module.kv_b_proj, None
            continue
        by_head = weight.detach().T.unflatten(1, (module.num_heads, -1))
        keys, values = by_head.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
        copies = [(module.W_UV.data, values.transpose(0, 1)), (module.W_UK_T.data, keys.permute(1, 2, 0))]
        yield module.kv_b_proj, copies
