"""A Hugging Face directory becomes a megatron-core checkpoint."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from quintet.engine.checkpoint.checkpoints import FORMAT
from quintet.engine.checkpoint.format import TensorFile, publish
from quintet.engine.checkpoint.parts import Part
from quintet.engine.checkpoint.reader import within
from quintet.engine.convert.parts import Converted, Parameter, Progress, common_dtype, wanted_dtype
from quintet.engine.convert.places import Places
from quintet.engine.weights.hf import check_hf
from quintet.engine.weights.hf_aux_files import copy_companions
from quintet.engine.weights.hf_read import TORCH_DTYPES, HfReader
from quintet.engine.weights.passthrough_tensors import held_copies
from quintet.errors import UserError
from quintet.models import ModelShape, Weight, held_shape, table_of
from quintet.models.mcore import Block, CheckpointMap
from quintet.models.weights_on_disk import WeightsOnDisk
from quintet.recipe.schema import Layout
from quintet.runs.atomic_dir import atomic_directory

CONFIG = "config.json"
COMPANIONS_IN = "hf"
"""Where a converted checkpoint keeps config.json and the tokenizer, for the way back."""


def hf_to_mcore(
    source: Path,
    destination: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int = 1,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write the model of a Hugging Face directory as a torch_dist checkpoint, in files as the ranks of a layout would
    write them; any layout can read them. dtype: "fp32", "bf16" or "fp16"; None keeps every tensor's own.

    Raises UserError for a directory that is not whole, sizes that do not divide the model, and a destination that cannot
    be written or is there already; the destination then does not exist.
    """
    source, destination, began = Path(source), Path(destination), time.perf_counter()
    if not (source / CONFIG).is_file():
        raise UserError(f"{source} is not a Hugging Face directory: there is no {CONFIG} in it")
    shape, cast = held_shape(source), wanted_dtype(dtype)
    try:
        layout = Layout(tp=tp, pp=pp, ep=ep, etp=etp, vpp=vpp)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"--{first['loc'][0]}={first['input']}: {first['msg'].lower()}") from None
    places = Places(shape, layout)
    places.check()
    weights = check_hf(shape, source)
    table = CheckpointMap(table_of(shape))
    dtypes = {name: _dtype(weight, weights, cast) for name, weight in table.weights.items()}
    total = sum(math.prod(full) * dtypes[weight.name].itemsize for _, full, weight in table.tensors())
    done, count = 0, 0
    with atomic_directory(destination, total) as directory:
        files: dict[int, TensorFile] = {}
        with HfReader(weights) as reader, ExitStack() as stack:
            for name, weight in table.weights.items():
                held = Parameter(table, weight, shape, dtypes[name])
                reader.fill(held.shards)
                for rank, of_tp, of_etp in places.of(weight):
                    if rank not in files:
                        files[rank] = stack.enter_context(TensorFile(directory / f"__{rank}_0.distcp"))
                    for block in table.blocks(name, tp=of_tp, etp=of_etp):
                        full, view = held.blocks[block.key]
                        part = within(view, full.box, block.box)
                        _write(files[rank], block, part)
                done, count = done + held.nbytes, count + len(held.blocks)
                if progress is not None:
                    progress(done, total)
        entries = [entry for file in files.values() for entry in file.entries]
        copies = list(held_copies(weights, shape))
        publish(directory, entries, _state(source, shape) | {"copies": copies})
        copy_companions(source, directory / COMPANIONS_IN)
    return Converted(total, count, time.perf_counter() - began)


def _write(file: TensorFile, block: Block, tensor: Tensor) -> None:
    """In pieces, each of which is copied: a file takes tensors that own their storage."""
    flat = tensor.reshape(-1)
    for piece in Part(block.key, block.shape, block.box, flat, saved=True).pieces():
        file.add(piece.key, piece.shape, piece.box, piece.flat.clone())


def _state(source: Path, shape: ModelShape) -> dict[str, Any]:
    """What an engine that loads the checkpoint reads of it: weights alone, of no step."""
    return {
        "format": FORMAT,
        "steps": 0,
        "optimizer": None,
        "moments": [],
        "layout": None,
        "family": shape.family,
        "converted_from": source.resolve().name,
    }


def _dtype(weight: Weight, weights: WeightsOnDisk, cast: torch.dtype | None) -> torch.dtype:
    """The type a parameter is written in: as asked for, or that of the tensors it is made of."""
    if cast is not None:
        return cast if weight.trained else torch.float32
    found = [weights.tensors[name].entry.dtype for name in weight.hf if name in weights.tensors]
    return common_dtype(TORCH_DTYPES[one] for one in found) if found else torch.float32
