"""What the checkpoint benchmark reads: a model with random weights, and a checkpoint as another layout writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from quintet.engine.checkpoint.format import TensorFile, publish
from quintet.engine.checkpoint.reader import Reader
from quintet.engine.convert.places import Places
from quintet.engine.weights.hf import planned_tensors
from quintet.engine.weights.hf_write import hf_writer
from quintet.models import ModelShape, family_of, table_of
from quintet.models.mcore import CheckpointMap
from quintet.recipe.schema import Layout

OPTIMIZER = "optimizer.state."


def write_model(path: Path, config: dict[str, Any], device: torch.device) -> None:
    """A Hugging Face directory in bf16 with weights of a training's size."""
    generator = torch.Generator(device).manual_seed(0)
    family = family_of(config)
    planned = planned_tensors(family.shape_of(config), torch.bfloat16)
    with hf_writer(path, planned) as writer:
        for one in planned:
            tensor = torch.empty(one.shape, dtype=one.dtype, device=device).normal_(
                0, 0.02, generator=generator
            )
            writer.add(one.name, (tensor + 1 if len(one.shape) == 1 else tensor).cpu())
        (writer.directory / "config.json").write_text(json.dumps(config | {"model_type": family.name}))


def recut(source: Path, destination: Path, shape: ModelShape, layout: Layout) -> None:
    """The same checkpoint, its tensors cut and filed as the ranks of another layout do."""
    reader, places = Reader(source), Places(shape, layout)
    places.check()
    table = CheckpointMap(table_of(shape))
    destination.mkdir()
    files = [TensorFile(destination / f"__{rank}_0.distcp") for rank in range(places.ranks)]
    for name, weight in table.weights.items():
        for rank, tp, etp in places.of(weight):
            for block in table.blocks(name, tp=tp, etp=etp):
                for key in _stored_as(reader, block.key):
                    files[rank].add(key, block.shape, block.box, reader.read_box(key, block.box))
    state = reader.state() | {"layout": layout.model_dump()}
    publish(destination, [entry for file in files for entry in file.close()], state)


def _stored_as(reader: Reader, key: str) -> list[str]:
    """The tensor, and what the optimizer keeps of it."""
    return [
        one for one in reader.tensors if one == key or (one.startswith(OPTIMIZER) and one.endswith("." + key))
    ]
