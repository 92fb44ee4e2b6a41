"""A megatron-core checkpoint, quintet's or Megatron-LM's, becomes a Hugging Face directory."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from quintet.engine.checkpoint.format import CHECKSUMS, INDEX
from quintet.engine.checkpoint.reader import Reader, within
from quintet.engine.convert.parts import Converted, Parameter, Progress, common_dtype, wanted_dtype
from quintet.engine.convert.to_mcore import COMPANIONS_IN
from quintet.engine.weights.hf import planned_tensors
from quintet.engine.weights.hf_aux_files import CHAT_TEMPLATE, saved_config, write_companions
from quintet.engine.weights.hf_write import DTYPE_NAMES, HfWriter, Planned, hf_writer
from quintet.engine.weights.passthrough_tensors import Carried, carried_from
from quintet.engine.weights.shards import Shard
from quintet.errors import UserError
from quintet.models import ModelShape, read_shape, table_of
from quintet.models.family import read_config
from quintet.models.mcore import Block, CheckpointMap, box_sizes, stacked, volume, whole_box
from quintet.models.weights_on_disk import titled

TRACKER = "latest_checkpointed_iteration.txt"
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
"""What keys of an optimizer's state begin with; megatron-core numbers those of a chain, one for experts and one for the rest."""


def mcore_to_hf(
    source: Path,
    destination: Path,
    *,
    companions: Path | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write the model in a torch_dist checkpoint as a Hugging Face directory. Optimizer state in it is passed over.

    source: a checkpoint, a step of a quintet run's checkpoints, or a directory that Megatron-LM saved several in, of
    which the latest is taken. companions: a Hugging Face directory with the model's config.json, and its tokenizer if it
    is to be copied; None takes what `hf_to_mcore` left in the checkpoint, or the model that the run's recipe names.
    dtype: "fp32", "bf16" or "fp16"; None keeps every tensor's own.

    Raises UserError for a checkpoint that is damaged or does not fit config.json, and for a destination that cannot be
    written or is there already; the destination then does not exist.
    """
    destination, began = Path(destination), time.perf_counter()
    path, cast = find_checkpoint(Path(source)), wanted_dtype(dtype)
    beside = _companions(path, None if companions is None else Path(companions))
    reader = _whole_model(path)
    shape = _shape(beside, reader)
    table = CheckpointMap(table_of(shape))
    found = _Found(reader, table, shape, beside)
    dtypes = {name: found.dtype(name, cast, one.trained) for name, one in table.weights.items()}
    kinds: dict[str, torch.dtype] = {}
    for name, weight in table.weights.items():
        for one in weight.hf:
            kinds[one] = common_dtype([dtypes[name], kinds.get(one, dtypes[name])])
    planned = {one.name: replace(one, dtype=kinds[one.name]) for one in planned_tensors(shape, torch.float32)}
    carried, notes = _carried(beside, shape, reader)
    done = 0
    with hf_writer(destination, [*planned.values(), *carried.planned(list(planned.values()))]) as writer:
        tensors = _Assembly(writer, planned, carried)
        for name, weight in table.weights.items():
            held = Parameter(table, weight, shape, dtypes[name])
            for block, view in held.blocks.values():
                found.read(block, view)
            for shard in held.shards:
                tensors.add(shard)
            done += held.nbytes
            if progress is not None:
                progress(done, writer.total_bytes)
        for name, tensor in carried.read():
            writer.add(name, tensor)
        main = max(planned.values(), key=lambda one: one.nbytes).dtype
        config = saved_config(read_config(beside), shape, main, carried.mtp_layers)
        write_companions(writer.directory, beside, config, None if companions else _template_of_run(path))
    return Converted(writer.total_bytes, len(planned), time.perf_counter() - began, notes)


def _whole_model(path: Path) -> Reader:
    """A checkpoint of a model. Raises UserError for one of adapters alone."""
    reader = Reader(path)
    state = reader.state()
    if state and not reader.checked:
        raise UserError(
            f"{path / CHECKSUMS} is missing: whether the other files are whole cannot be told. Convert another step"
        )
    adapters = state.get("adapters")
    if adapters:
        raise UserError(
            f"{path} holds adapters alone, beside the weights of {adapters.get('base_path')}: the run writes the model with its "
            "adapters merged to RUN/checkpoint, and with checkpoint.hf_every_steps on the way"
        )
    return reader


def _shape(companions: Path, reader: Reader) -> ModelShape:
    """Shape of the model in config.json, and without layers for multi-token prediction where the checkpoint has none."""
    shape = read_shape(companions)
    return shape if any(key.startswith("mtp.") for key in reader.tensors) else shape.without_mtp()


def _carried(companions: Path, shape: ModelShape, reader: Reader) -> tuple[Carried, tuple[str, ...]]:
    """What is written beside the checkpoint's tensors, and a word on what is not."""
    if any((companions / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        return carried_from(companions, shape), ()
    copies: dict[str, list[str]] = {}
    for name, copy in reader.state().get("copies", ()):
        copies.setdefault(name, []).append(copy)
    lost = read_shape(companions).mtp_layers - shape.mtp_layers
    note = (
        f"{companions / 'config.json'} speaks of {lost} layers for multi-token prediction, which neither the checkpoint nor "
        f"{companions} holds: the model was written without them"
    )
    return Carried(None, copies, [], shape.mtp_layers), (note,) if lost else ()


def find_checkpoint(path: Path) -> Path:
    """Return the directory with the tensors: `path` itself, its `policy`, or the step that Megatron-LM's tracker file names.

    Raises UserError when there is none.
    """
    if not path.is_dir():
        raise UserError(f"{path} does not exist")
    tracker = path / TRACKER
    if tracker.is_file():
        step = tracker.read_text(encoding="utf-8", errors="replace").strip()
        return path / (f"iter_{int(step):07d}" if step.isdigit() else step)
    for one in (path, path / "policy"):
        if (one / INDEX).is_file():
            return one
    raise UserError(
        f"{path} is not a checkpoint: there is neither {INDEX} nor policy/{INDEX} nor {TRACKER} in it. Name a directory "
        "that `quintet convert hf-to-mcore` or Megatron-LM wrote in the torch_dist format, or RUN/checkpoints/step-…"
    )


def _companions(path: Path, given: Path | None) -> Path:
    """Where config.json and the tokenizer are: as given, in the checkpoint, or where the run that saved it has them."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise UserError(f"--hf {given}: there is no config.json in it")
        return given
    for one in (path / COMPANIONS_IN, *_of_run(path)):
        if (one / "config.json").is_file():
            return one
    raise UserError(
        f"{path} does not say what model it holds: name a Hugging Face directory with its config.json, by --hf DIRECTORY"
    )


def _run_of(path: Path) -> Path | None:
    """The run whose checkpoint it is: of RUN/checkpoints/step-…/policy."""
    run = path.parent.parent.parent
    return run if path.parent.parent.name == "checkpoints" and (run / "recipe.yaml").is_file() else None


def _template_of_run(path: Path) -> str | None:
    """The chat template that the run used."""
    run = _run_of(path)
    file = None if run is None else run / CHAT_TEMPLATE
    return file.read_bytes().decode() if file is not None and file.is_file() else None


def _of_run(path: Path) -> Iterator[Path]:
    """The recipe's model.path, and what the run exported."""
    run = _run_of(path)
    if run is None:
        return
    recipe = run / "recipe.yaml"
    model = _mapping(_mapping(yaml.safe_load(recipe.read_text(encoding="utf-8"))).get("model"))
    if isinstance(model.get("path"), str):
        yield Path(model["path"])
    yield run / "checkpoint"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class _Found:
    """Where a checkpoint has each tensor of a model: one a layer and expert, or stacked, as megatron-core can.

    Raises UserError listing what is missing, left over, or of another shape than config.json says.
    """

    def __init__(self, reader: Reader, table: CheckpointMap, shape: ModelShape, companions: Path) -> None:
        self._reader = reader
        self._blocks: dict[str, list[Block]] = {}
        self._at: dict[str, Block] = {}
        missing, wrong, used = [], [], set()
        for name in table.weights:
            self._blocks[name] = table.blocks(name)
            for block in self._blocks[name]:
                at = next((one for one in _forms(block, shape) if one.key in reader.tensors), None)
                if at is None:
                    missing.append(block.key)
                    continue
                stored = reader.tensors[at.key]
                used.add(at.key)
                self._at[block.key] = at
                if not _fits(stored.shape, at, table.weights[name].split == "vocab"):
                    wrong.append(f"{at.key} is {stored.shape}, not {at.shape}")
                elif stored.dtype not in DTYPE_NAMES:
                    wrong.append(
                        f"{at.key} is of {stored.dtype}, expected {', '.join(map(str, DTYPE_NAMES))}"
                    )
        extra = [one for one in reader.tensors if one not in used and not _OPTIMIZER.match(one)]
        faults = {"missing": missing, "left over": extra, "of another shape": wrong}
        if said := titled({title: sorted(set(names)) for title, names in faults.items()}):
            raise UserError(
                f"{reader.path}: tensors do not fit the {shape.family} model of {companions / 'config.json'}; {said}"
            )

    def dtype(self, name: str, cast: torch.dtype | None, trained: bool) -> torch.dtype:
        """The type a parameter is written in: as asked for, or as it was stored."""
        if cast is not None:
            return cast if trained else torch.float32
        return common_dtype(self._reader.tensors[self._at[one.key].key].dtype for one in self._blocks[name])

    def read(self, block: Block, view: Tensor) -> None:
        """Copy a block into a view of the parameter, chunk by chunk.

        Raises UserError naming the file for damage, and for values that are not finite.
        """
        at = self._at[block.key]
        for chunk, part in self._reader.meeting(at.key, at.box):
            target = within(view.view(box_sizes(at.box)), at.box, part)
            target.copy_(within(self._reader.read(chunk), chunk.box, part))
        if not (torch.isfinite(view.sum()) or torch.isfinite(view).all()):
            raise UserError(
                f"{self._reader.path}: {at.key} holds values that are not finite as {view.dtype}: training had diverged "
                "when it was saved; take an earlier checkpoint"
            )


def _forms(block: Block, shape: ModelShape) -> Iterator[Block]:
    """What a checkpoint may call a block: itself, or within megatron-core's stacks."""
    experts = shape.moe.experts if shape.moe else 0
    yield block
    yield stacked(block, experts=experts, layers=shape.layers)
    yield stacked(block, experts=experts, layers=None)


def _fits(stored: tuple[int, ...], wanted: Block, vocabulary: bool) -> bool:
    """Rows of a vocabulary may be padded."""
    if vocabulary and len(stored) == len(wanted.shape):
        return stored[0] >= wanted.shape[0] and stored[1:] == wanted.shape[1:]
    return stored == wanted.shape


class _Assembly:
    """Hands tensors to a writer once they are complete: some hold a part of many parameters."""

    def __init__(self, writer: HfWriter, planned: dict[str, Planned], carried: Carried) -> None:
        self._writer, self._planned, self._copies = writer, planned, carried.copies
        self._begun: dict[str, tuple[Tensor, int]] = {}

    def add(self, shard: Shard) -> None:
        """Take over one parameter's part of a tensor."""
        plan, whole = self._planned[shard.name], whole_box(shard.shape)
        if shard.box == whole:
            self._write(shard.name, shard.read().to(plan.dtype))
            return
        if shard.name not in self._begun:
            self._begun[shard.name] = torch.empty(plan.shape, dtype=plan.dtype), volume(whole)
        tensor, missing = self._begun.pop(shard.name)
        within(tensor, whole, shard.box).copy_(shard.read())
        missing -= volume(shard.box)
        if missing:
            self._begun[shard.name] = tensor, missing
        else:
            self._write(shard.name, tensor)

    def _write(self, name: str, tensor: Tensor) -> None:
        for one in (name, *self._copies.get(name, ())):
            self._writer.add(one, tensor)
