"""Adapters in and out of directories of peft's (`quintet.models.peft` says what is where in them)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quintet.engine.agree import run_on_all_or_raise
from quintet.engine.weights.hf import full_tensors
from quintet.engine.weights.hf_write import Planned
from quintet.engine.weights.shards import Shard
from quintet.errors import UserError
from quintet.models import ModelShape, Weight, table_of
from quintet.models.lora import LoraShape, adapter_weights
from quintet.models.peft import CONFIG, SCORE, WEIGHTS, Place, adapter_config, places, read_adapter
from quintet.runs.atomic_dir import atomic_directory


def load_adapters(shards: Iterable[Shard], shape: ModelShape, lora: LoraShape, path: Path) -> None:
    """Fill the ranks' shards of adapters from a directory. Collective.

    Raises UserError on every rank when its adapters are not those of `lora`, or its files are damaged.
    """
    weights = table_of(shape)
    where = run_on_all_or_raise(lambda: _checked(weights, lora, path))
    run_on_all_or_raise(lambda: _fill(shards, where, lora.rank, path / WEIGHTS))


def _checked(weights: Sequence[Weight], lora: LoraShape, path: Path) -> dict[str, Place]:
    held, where = read_adapter(path, weights)
    wanted = {w.hf[0] for w in adapter_weights(weights, lora)}
    if (held.rank, held.scale) != (lora.rank, lora.scale) or set(where) != wanted:
        raise UserError(
            f"{path} holds other adapters (rank {held.rank}, scale {held.scale:g}) than the engine has"
        )
    return where


def _fill(shards: Iterable[Shard], where: Mapping[str, Place], rank: int, file: Path) -> None:
    with safe_open(str(file), framework="pt") as opened:
        read = lru_cache(maxsize=4)(opened.get_tensor)  # the experts of a layer lie in the same few tensors
        for shard in shards:
            place = where[shard.name]
            full = _part(read(place.name), place, shard.name, rank, file)
            shard.write(full[tuple(slice(*ends) for ends in shard.box)])


def _part(stored: Tensor, place: Place, name: str, rank: int, file: Path) -> Tensor:
    """The A or B of one layer out of a tensor of the file."""
    if not place.experts:
        return stored
    if ".lora_A." in name:
        return _of_expert(stored, place, name, rank)
    rows = stored.unflatten(1, (place.ranks, place.experts))[slice(*place.rows), :, place.expert]
    if rows[:, : place.start].any() or rows[:, place.start + rank :].any():
        raise UserError(
            f"{file}: {place.name}: expected zeros off the blocks of gate and up, each of which has ranks of its own"
        )
    return _of_expert(stored, place, name, rank)


def _of_expert(stored: Tensor, place: Place, name: str, rank: int) -> Tensor:
    """View of one layer's A or B in a tensor of all experts."""
    own = slice(place.start, place.start + rank)
    if ".lora_A." in name:
        return stored.unflatten(0, (place.experts, place.ranks))[place.expert, own]
    return stored.unflatten(1, (place.ranks, place.experts))[slice(*place.rows), own, place.expert]


def save_adapters(
    shards: list[Shard],
    shape: ModelShape,
    lora: LoraShape,
    dtype: torch.dtype,
    device: torch.device,
    path: Path,
    base: str | None,
) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained` loads. Collective; rank 0 writes.

    shards: of the adapters, and of a value head. base: the model that the adapters are for.
    """
    weights = table_of(shape)
    entries = [*adapter_weights(weights, lora), *(w for w in weights if w.name == "value_head.weight")]
    planned = [Planned(w.hf[0], w.shapes[0], dtype) for w in entries]
    tensors: dict[str, Tensor] = {}
    where = places(weights, lora)
    for name, full in full_tensors(shards, planned, dtype, device):
        place = where.get(name)
        if place is None:
            tensors[SCORE] = full
        elif not place.experts:
            tensors[place.name] = full
        else:
            if place.name not in tensors:
                tensors[place.name] = torch.zeros(place.shape, dtype=dtype)
            _of_expert(tensors[place.name], place, name, lora.rank).copy_(full)
    config = adapter_config(weights, lora, base, value=shape.head == "value")
    run_on_all_or_raise(lambda: _write(path, tensors, config) if dist.get_rank() == 0 else None)


def _write(path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A directory of that name is whole."""
    with atomic_directory(path, sum(one.nbytes for one in tensors.values())) as directory:
        try:
            save_file(tensors, str(directory / WEIGHTS), metadata={"format": "pt"})
        except SafetensorError as error:  # of the disk: what is written is in order
            raise UserError(f"{path} cannot be written: {error}") from None
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
