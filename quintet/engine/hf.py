"""Hugging Face directories in and out: safetensors read slice by slice, written by rank 0."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quintet.engine.reshard import Resharder
from quintet.engine.shards import Shard
from quintet.errors import UserError
from quintet.models import ModelShape, family_named
from quintet.models.family import VALUE_MODEL
from quintet.models.weights_on_disk import VALUE_HEAD, check_names, weight_files

SHARD_BYTES = 4 << 30
GATHERED_BYTES = 256 << 20

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files beside the weights that a saved model takes along."""


class HfWeights:
    """The tensors of a Hugging Face directory, by name, read lazily."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.file_of = weight_files(self.path)
        self._open: dict[Path, Any] = {}

    def names(self) -> set[str]:
        return set(self.file_of)

    def read(self, shard: Shard) -> Tensor:
        """The box of one tensor, reading no more than it.

        Raises UserError naming file and tensor when shapes disagree or the file is damaged.
        """
        file = self.file_of[shard.name]
        if file not in self._open:
            self._open[file] = _open(file)
        try:
            piece = self._open[file].get_slice(shard.name)
            found = tuple(piece.get_shape())
            if found != shard.shape:
                raise UserError(f"{file}: {shard.name} has shape {found}, config.json implies {shard.shape}")
            return piece[tuple(slice(a, b) for a, b in shard.box)]
        except SafetensorError as error:
            raise UserError(f"{file}: cannot read {shard.name}: {error}") from None


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({error})") from None


def load_hf(shards: list[Shard], shape: ModelShape, path: Path) -> None:
    """Fill this rank's shards from a Hugging Face directory, one slice at a time."""
    weights = HfWeights(path)
    check_names(weights.names(), shape, path)
    for shard in shards:
        if shard.name == VALUE_HEAD and VALUE_HEAD not in weights.file_of:
            shard.write(torch.zeros(shard.box_shape))
        else:
            shard.write(weights.read(shard))


def full_tensors(
    shards: list[Shard], shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors in the family's order, parameters as `dtype` and buffers in fp32. Collective; rank 0 gets them on the
    CPU, others get nothing.

    Some GATHERED_BYTES are gathered at a time, and never less than a tensor: that and its shards are rank 0's memory.
    """
    mine: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        mine[shard.name].append(shard)
    for batch in _batches(shape, dtype):
        targets = []
        for name, full, trained in batch if dist.get_rank() == 0 else []:
            out = torch.empty(full, dtype=dtype if trained else torch.float32, device=device)
            targets.append(Shard(name, full, tuple((0, n) for n in full), out, trained))
        sources = [shard for name, _, _ in batch for shard in mine[name]]
        Resharder(sources, targets, dtype=dtype, device=device).run()
        for target in targets:
            yield target.name, target.view.cpu()


def _batches(shape: ModelShape, dtype: torch.dtype) -> Iterator[list[tuple[str, tuple[int, ...], bool]]]:
    """Every tensor, about GATHERED_BYTES at a time: name, shape, and whether it is a parameter."""
    batch: list[tuple[str, tuple[int, ...], bool]] = []
    held = 0
    for weight in family_named(shape.family).weights(shape):
        for name, full in zip(weight.hf, weight.shapes, strict=True):
            size = math.prod(full) * dtype.itemsize
            if batch and held + size > GATHERED_BYTES:
                yield batch
                batch, held = [], 0
            batch.append((name, full, weight.trained))
            held += size
    yield batch


def save_hf(
    shards: list[Shard],
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    path: Path,
    companions: Path,
) -> None:
    """Write a Hugging Face directory that transformers loads. Collective; rank 0 writes.

    companions: the directory the model came from. Its tokenizer files are copied, and its config.json with the type
    of the weights as they are written.
    """
    writer = _Writer(path) if dist.get_rank() == 0 else None
    for name, tensor in full_tensors(shards, shape, dtype, device):
        assert writer is not None
        writer.add(name, tensor)
    if writer is not None:
        writer.finish()
        for name in COMPANIONS:
            if (companions / name).is_file():
                shutil.copy(companions / name, path / name)
        config = json.loads((companions / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        if shape.mtp_layers:  # of another policy than this one by now
            config["num_nextn_predict_layers"] = 0
        if shape.head == "value":
            config["architectures"] = [
                name.replace("ForCausalLM", VALUE_MODEL) for name in config["architectures"]
            ]
            config["id2label"], config["label2id"] = {"0": "value"}, {"value": 0}
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    dist.barrier()


class _Writer:
    """Safetensors files of at most SHARD_BYTES and their index."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.pending, self.bytes = path, {}, 0  # type: ignore[var-annotated]
        self.files: list[list[str]] = []
        self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.bytes + size > SHARD_BYTES:
            self._flush()
        self.pending[name] = tensor.contiguous()
        self.bytes += size
        self.total += size

    def _flush(self) -> None:
        file = self.path / f"model-{len(self.files) + 1:05d}.safetensors"
        save_file(self.pending, str(file), metadata={"format": "pt"})
        self.files.append(list(self.pending))
        self.pending, self.bytes = {}, 0

    def finish(self) -> None:
        self._flush()
        count = len(self.files)
        if count == 1:
            (self.path / "model-00001.safetensors").rename(self.path / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self.files, start=1):
            file = f"model-{i:05d}-of-{count:05d}.safetensors"
            (self.path / f"model-{i:05d}.safetensors").rename(self.path / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
