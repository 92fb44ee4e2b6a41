"""What a saved Hugging Face directory takes along from the one the model came from, tensor by tensor.

A model that is trained has no layers for multi-token prediction (`ModelShape.without_mtp`); those of its source are
written as they are. Where the source holds the embedding and the head a second time for these layers, the copies are
written again: as the saved model's own where they were the source's own, else as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quintet.engine.weights.hf_read import TORCH_DTYPES, HfReader, same_bytes
from quintet.engine.weights.hf_write import Planned
from quintet.engine.weights.shards import Shard
from quintet.errors import UserError
from quintet.models import ModelShape, held_shape, table_of
from quintet.models.mcore import whole_box
from quintet.models.weights_on_disk import WeightsOnDisk, find_weights, mtp_weights


@dataclass(frozen=True)
class Carried:
    """Tensors of the source that a saved model takes along. copies: by tensor of the saved model, the names under which it is
    written again. tensors: of the source, written as they are. mtp_layers: layers for multi-token prediction that the saved
    directory has."""

    source: WeightsOnDisk | None
    copies: dict[str, list[str]]
    tensors: list[str]
    mtp_layers: int

    def planned(self, model: Sequence[Planned]) -> list[Planned]:
        """Return what comes beside the saved model's own tensors."""
        found = [replace(one, name=copy) for one in model for copy in self.copies.get(one.name, ())]
        for name in self.tensors:
            assert self.source is not None
            entry = self.source.tensors[name].entry
            found.append(Planned(name, entry.shape, TORCH_DTYPES[entry.dtype]))
        return found

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the source's tensors, one at a time.

        Raises UserError naming file and tensor when one cannot be read.
        """
        if self.source is None:
            return
        with HfReader(self.source) as reader:
            for name in self.tensors:
                entry = self.source.tensors[name].entry
                tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
                reader.fill([Shard(name, entry.shape, whole_box(entry.shape), tensor)])
                yield name, tensor


def carried_from(source: Path, shape: ModelShape) -> Carried:
    """Return what a model of this shape, saved, takes along from the directory it came from. A value model takes nothing: its
    trunk has no head that could predict.

    Raises UserError when the directory's weights cannot be read.
    """
    there = held_shape(source)
    if shape.head == "value" or not there.mtp_layers:
        return Carried(None, {}, [], shape.mtp_layers)
    weights = find_weights(source)
    copies: dict[str, list[str]] = {}
    tensors = []
    for name, copy in held_copies(weights, there):
        if same_bytes(weights.tensors[name], weights.tensors[copy]):
            copies.setdefault(name, []).append(copy)
        else:
            tensors.append(copy)
    if not shape.mtp_layers:
        tensors += [name for weight in mtp_weights(there) for name in weight.hf]
    return Carried(weights, copies, tensors, there.mtp_layers)


def refuse_other_copies(weights: WeightsOnDisk, shape: ModelShape) -> None:
    """Refuse a directory whose copies differ: layers for multi-token prediction share embedding and head with the model: what a
    directory holds of them a second time is the same.

    Raises UserError naming the file and the tensor where it is not.
    """
    for name, copy in held_copies(weights, shape):
        if not same_bytes(weights.tensors[name], weights.tensors[copy]):
            raise UserError(
                f"{weights.tensors[copy].file}: {copy} differs from {name}, which layers for multi-token prediction share "
                "with the model; make it the same, or remove it"
            )


def held_copies(weights: WeightsOnDisk, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield each tensor that a directory holds a second time: its name, and that of the copy."""
    for weight in table_of(shape):
        yield from ((weight.hf[0], copy) for copy in weight.copies if copy in weights.tensors)
