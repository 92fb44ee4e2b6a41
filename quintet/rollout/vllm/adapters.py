"""Adapters inside vLLM: low-rank matrices beside weights that stay as they were read from the model's directory.

vLLM keeps slots for adapters in each layer, and requests name the one they want. Here is one slot and one adapter, which all
requests name. It comes with its scale in B, so that what the slot holds is what was sent, bit for bit: the slot's matrices are
taken for the parameters of a model whose weights are the adapter's. They are found the first time, when vLLM itself puts the
adapter into its slot, and written in place from then on.

vLLM is made without weights. They are read as a sync's are taken, so that it is known where each lies and they can be proved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quintet.engine.weights.fp8 import dequantize
from quintet.errors import SyncMismatch
from quintet.models import ModelShape, check_weights, table_of, trained_shape
from quintet.models.fp8_blocks import SCALE
from quintet.models.lora import PEFT_PREFIX, LoraShape, adapted, linears
from quintet.models.mcore import whole_box
from quintet.recipe.vllm import RANKS
from quintet.rollout.base import Piece, Wanted
from quintet.rollout.vllm.weights import LoadReport, Reading, Weights
from quintet.rollout.vllm.worker_models import WorkerModels

ADAPTER = 1
"""vLLM's number of the adapter."""


def adapter_arguments(shape: ModelShape, lora: LoraShape) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs with which it has a slot for these adapters, beside the layers that have some."""
    layers = linears(table_of(shape))
    keys = {part.name.rpartition(".")[2] for linear in layers for part in adapted(linear, lora)}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        "lora_target_modules": sorted(keys),
        "load_format": "dummy",
    }


def adapter_request() -> Any:
    """Return what a request names the adapter by. Its path is never read: the adapter is there before any request."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER, "policy")


def pieces_on_disk(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Iterator[Piece]:
    """Yield the weights in a Hugging Face directory, as the engine has them."""
    shape = trained_shape(model_dir)
    names = {name for weight in table_of(shape) for name in weight.hf}
    found = check_weights(model_dir, shape).tensors
    with ExitStack() as stack:
        files = {
            path: stack.enter_context(safe_open(path, framework="pt"))
            for path in {of.file for one in found.values() for of in (one, one.scales) if of is not None}
        }
        for name in sorted(
            names & found.keys(), key=lambda name: (found[name].file, found[name].entry.start)
        ):
            tensor, scales = files[found[name].file].get_tensor(name).to(device), found[name].scales
            if scales is not None:
                tensor = dequantize(tensor, files[scales.file].get_tensor(name + SCALE).to(device).float())
            full = tuple(tensor.shape)
            yield Piece(name, full, whole_box(full), tensor.to(dtype))


class LoraSlots:
    """The weights of one worker with adapters. frozen: those of its model."""

    def __init__(self, manager: Any, frozen: Weights) -> None:
        self._slot, self._frozen = Slot(manager), frozen
        self._adapters = Weights(WorkerModels(self._slot), self._slot.load, lambda name: False)

    def read_frozen(self, pieces: Iterator[Piece]) -> LoadReport:
        """Take the frozen weights, once."""
        return self._frozen.take([one] for one in pieces)

    def wanted(self) -> list[Wanted] | None:
        """Return the parts of adapters that this worker reads: see `Weights.wanted`."""
        return self._adapters.wanted()

    def take(self, batches: Iterator[list[Piece]]) -> LoadReport:
        """Take new weights of adapters: see `Weights.take`."""
        self._slot.occupy()
        return self._adapters.take(batches)

    def read(self) -> Reading:
        """Return fingerprints of adapters and frozen weights: see `Weights.read`."""
        alone, beside = self._adapters.read(), self._frozen.read()
        return Reading(
            beside.fingerprints | alone.fingerprints,
            beside.unreadable | alone.unreadable,
            beside.untaken | alone.untaken,
        )


class Slot(torch.nn.Module):
    """The parts of vLLM's slot that an adapter fills, as parameters. manager: vLLM's of one worker's model; there are no
    parameters before the first `load`."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._manager, self._rank = manager, 0

    def occupy(self) -> None:
        """Have the slot again where vLLM has dropped the adapter, as it does when it loads weights itself; with zeros in it."""
        if self._rank and ADAPTER not in self._manager.list_adapters():
            nowhere = {
                f"{PEFT_PREFIX}nowhere.lora_{x}.weight": torch.zeros(self._rank, self._rank) for x in "AB"
            }
            self._manager.add_adapter(_adapter(nowhere, self._rank))
            self._manager.activate_adapter(ADAPTER)

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Put an adapter into the slot. Raises SyncMismatch where an A is without its B."""
        tensors = dict(weights)
        rank = next(t.shape[0] for name, t in tensors.items() if ".lora_A." in name)
        for name in tensors:
            here, there = ("A", "B") if ".lora_A." in name else ("B", "A")
            other = name.replace(f".lora_{here}.", f".lora_{there}.")
            if other not in tensors:
                raise SyncMismatch(f"vLLM did not get {other}: its weights are not the engine's")
        adapter = _adapter(tensors, rank)
        self._manager.remove_adapter(ADAPTER)
        self._manager.add_adapter(adapter)
        self._show(adapter, rank)
        self._manager.activate_adapter(ADAPTER)
        adapter.loras.clear()  # vLLM would keep it beside the slot
        self._rank = rank

    def _show(self, adapter: Any, rank: int) -> None:
        for name, layer in self._manager.modules.items():
            found = adapter.get_lora(name)
            if found is None:
                continue
            parts = found.lora_b if isinstance(found.lora_b, list) else [found.lora_b]
            held = torch.nn.Module()
            for number, part in enumerate(parts):
                if part is None:
                    continue
                a, b = layer.lora_a_stacked[number][0, 0, :rank], layer.lora_b_stacked[number][0, 0, :, :rank]
                held.register_parameter(f"A{number}", torch.nn.Parameter(a, requires_grad=False))
                held.register_parameter(f"B{number}", torch.nn.Parameter(b, requires_grad=False))
            self.add_module(name.replace(".", "/"), held)


def _adapter(tensors: dict[str, Tensor], rank: int) -> Any:
    """As vLLM has an adapter, with a scale of one."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    kind, helper = next(iter(tensors.values())), PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    return LoRAModel.from_lora_tensors(ADAPTER, tensors, helper, device=str(kind.device), dtype=kind.dtype)
