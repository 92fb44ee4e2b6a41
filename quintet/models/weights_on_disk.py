"""What the safetensors files of a Hugging Face directory hold, from their headers alone: no weight is read, no torch."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quintet.errors import UserError, reading
from quintet.models.family import read_shape, table_of
from quintet.models.fp8_blocks import BLOCK, SCALE, scales_shape
from quintet.models.fp8_blocks import DTYPE as FP8
from quintet.models.hf_config import read_json
from quintet.models.safetensors_header import DTYPES, Entry, Header, read_header
from quintet.models.shape import ModelShape
from quintet.models.weight import Weight

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the config."""

INDEX = "model.safetensors.index.json"
_MOST_INDEX_BYTES = 32 << 20

VALUE_HEAD = "score.weight"
"""The head of a value model, which starts at zero where a checkpoint has none."""


@dataclass(frozen=True)
class Located:
    """One tensor and the file it is in. scales: of the blocks of one in 8 bits."""

    file: Path
    entry: Entry
    scales: Located | None = None

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of the tensor. Raises UserError naming a file that cannot be read."""
        with reading(self.file), self.file.open("rb") as file:
            file.seek(self.entry.start + start)
            return file.read(stop - start)


@dataclass(frozen=True)
class WeightsOnDisk:
    """What the safetensors files of a Hugging Face directory hold, by tensor and by file. Scales of blocks are with their tensor."""

    path: Path
    tensors: dict[str, Located]
    headers: dict[Path, Header]


def fingerprint(weights: WeightsOnDisk, nbytes: int = 4096) -> str:
    """Return what tells weights of the same model apart: of each tensor name, type, shape, and some bytes from its middle.

    The same whichever files they are in, and for every copy: nothing that a download keeps beside them counts. Training
    changes what is in the middle of a tensor; a change by hand elsewhere in one of more than `nbytes` is not seen.
    Raises UserError naming a file that cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, one in sorted(weights.tensors.items()):
        entry = one.entry
        size = entry.stop - entry.start
        start = max(0, (size - nbytes) // 2)
        digest.update(f"{name} {entry.dtype} {entry.shape} ".encode())
        digest.update(one.read(start, min(start + nbytes, size)))
        if one.scales is not None:
            size = one.scales.entry.stop - one.scales.entry.start
            digest.update(one.scales.read(0, min(nbytes, size)))
    return digest.hexdigest()


def find_weights(path: Path, alone: str = "model.safetensors") -> WeightsOnDisk:
    """Return the tensors of a Hugging Face directory. Files that its index does not name are not looked at. alone: the file without one.

    Raises UserError when there are no weights, when a file is not whole, and when the index and the files disagree.
    """
    path = Path(path)
    index, single = path / INDEX, path / alone
    if not index.is_file():
        if not single.is_file():
            raise UserError(f"{path}: neither {alone} nor {INDEX} is there")
        header = read_header(single)
        found = {n: Located(single, e) for n, e in header.tensors.items()}
        return WeightsOnDisk(path, _with_scales(found), {single: header})
    file_of = _read_index(index)
    named: dict[Path, set[str]] = defaultdict(set)
    for name, file in file_of.items():
        named[file].add(name)
    if single.is_file() and single not in named:
        raise UserError(
            f"{path}: both {single.name} and {index.name} are there and the index does not name the former; which of them "
            "holds the model cannot be told: move the other away"
        )
    headers = {}
    for file, names in sorted(named.items()):
        if not file.is_file():
            raise UserError(f"{file} is missing: {index} names it; download it again")
        headers[file] = read_header(file)
        _check_index(index, file_of, names, file, headers[file])
    found = {n: Located(f, headers[f].tensors[n]) for n, f in file_of.items()}
    return WeightsOnDisk(path, _with_scales(found), headers)


def _with_scales(tensors: dict[str, Located]) -> dict[str, Located]:
    """The same tensors, those in 8 bits with their scales, which are no weights of their own."""
    eight = {name for name, one in tensors.items() if one.entry.dtype == FP8 and name + SCALE in tensors}
    scales = {name + SCALE for name in eight}
    return {
        name: Located(one.file, one.entry, tensors[name + SCALE]) if name in eight else one
        for name, one in tensors.items()
        if name not in scales
    }


def _read_index(index: Path) -> dict[str, Path]:
    names = read_json(index, _MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) and file for file in names.values()):
        raise UserError(f'{index}: expected a "weight_map" object that maps tensor names to file names')
    first = {file: name for name, file in reversed(names.items())}
    for file, name in first.items():
        if len(file) > 255 or "\0" in file:
            raise UserError(f"{index}: {name} is said to be in {file!r:.80}, which is no name of a file")
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise UserError(f"{index}: {name} is said to be in {file}, which is outside of the directory")
    paths = {file: index.parent / file for file in first}
    return {name: paths[file] for name, file in names.items()}


def _check_index(index: Path, file_of: dict[str, Path], names: set[str], file: Path, header: Header) -> None:
    """One file against the index: each has to name the tensors that the other does. names: those said to be in the file."""
    for name in header.tensors:
        if name not in names:
            says = f"says it is in {file_of[name].name}" if name in file_of else "does not name that tensor"
            raise UserError(f"{file}: {name} is in it, but {index} {says}; the two are not of one download")
    if missing := names - header.tensors.keys():
        raise UserError(
            f"{file}: {min(missing)} is not in it, though {index} says so; the two are not of one download"
        )


def mtp_weights(shape: ModelShape) -> list[Weight]:
    """Return the entries of layers for multi-token prediction in a family's table, in a model that has them."""
    return [weight for weight in table_of(shape) if weight.name.startswith("mtp.")]


def held_shape(path: Path, names: set[str] | None = None) -> ModelShape:
    """Return the shape of the model that a Hugging Face directory holds: `read_shape`, and without layers for multi-token
    prediction where config.json speaks of them and not one of their tensors is there, which is how transformers saves a model.

    names: of the directory's tensors, where they are known already; otherwise its index is believed, and the one file where there is
    none. Raises UserError as `read_shape` does, and where neither can be read.
    """
    shape = read_shape(path)
    if not shape.mtp_layers:
        return shape
    index = Path(path) / INDEX
    if names is None:  # of the largest models an index is read in a tenth of the time that headers take
        names = set(_read_index(index) if index.is_file() else find_weights(path).tensors)
    held = any(name in names for weight in mtp_weights(shape) for name in weight.hf)
    return shape if held else shape.without_mtp()


def _stored(shape: ModelShape, names: set[str], where: Path) -> tuple[Sequence[Weight], set[str]]:
    """What the directory of a model of this shape must hold, and the tensors it may hold besides.

    Layers for multi-token prediction must be whole whether or not the shape has them: a saved model takes them along.
    """
    whole = replace(shape, mtp_layers=shape.mtp_layers or held_shape(where, names).mtp_layers)
    table = table_of(whole)
    spare = {copy for weight in table for copy in weight.copies}
    if shape.tied_embeddings or shape.head == "value":
        head, _ = _ends(whole)
        spare |= {*head.hf, *head.copies}
    return table, spare


def _ends(shape: ModelShape) -> tuple[Weight, Weight]:
    """The entries of an LM head of its own and of the embedding, whether or not the shape has such a head."""
    untied = replace(shape, tied_embeddings=False, head="lm")
    table = {weight.name: weight for weight in table_of(untied)}
    return table["output_layer.weight"], table["embedding.word_embeddings.weight"]


def head_and_embedding(shape: ModelShape) -> list[str]:
    """Return what checkpoints of the family call an LM head of its own, and the embedding."""
    return [weight.hf[0] for weight in _ends(shape)]


def _fitting_table(names: set[str], shape: ModelShape, where: Path) -> Sequence[Weight]:
    """The entries of what a directory holds, once every tensor is accounted for: none missing, none left over.

    A value model may start from a language model: it then leaves the LM head and has no head of its own yet. A directory
    that says it holds a value model has one.

    where: the directory. Raises UserError listing what is missing and what has no place.
    """
    table, spare = _stored(shape, names, where)
    wanted = {name for weight in table for name in weight.hf}
    starts = shape.head == "value" and read_shape(where).head == "lm"
    missing = sorted(wanted - names - ({VALUE_HEAD} if starts else set()))
    extra = sorted(n for n in names - wanted - spare if not n.endswith(IGNORED_SUFFIXES))
    if missing or extra:
        said = titled({"missing": missing, "left over": extra})
        raise UserError(f"{where}: tensors do not fit a {shape.family} model of this config; {said}")
    return table


def listed(names: list[str], most: int = 12) -> str:
    """Return names in a row, the rest counted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def titled(found: Mapping[str, list[str]]) -> str:
    """Return what was found wrong with tensors, a title and their names each; nothing of what there is none of."""
    return "; ".join(f"{title}: {listed(names)}" for title, names in found.items() if names)


def check_weights(path: Path, shape: ModelShape) -> WeightsOnDisk:
    """Check names, shapes and types of all weights in a directory against what config.json implies; reads headers only.

    Raises UserError naming the file, and the tensor where one is wrong.
    """
    found = find_weights(path)
    for weight in _fitting_table(set(found.tensors), shape, found.path):
        copies = [(copy, weight.shapes[0]) for copy in weight.copies]
        for name, wanted in (*weight.tensors, *copies):
            if name not in found.tensors and (name == VALUE_HEAD or name in weight.copies):
                continue
            file, entry = found.tensors[name].file, found.tensors[name].entry
            if entry.shape != wanted:
                raise UserError(f"{file}: {name} has shape {entry.shape}, config.json implies {wanted}")
            if entry.dtype not in DTYPES:
                raise UserError(
                    f"{file}: {name} is of type {entry.dtype}; expected {', '.join(DTYPES)}: "
                    "quantized weights cannot be trained"
                )
            if entry.dtype == FP8:
                _check_scales(name, found.tensors[name])
    return found


def _check_scales(name: str, one: Located) -> None:
    """See that a tensor in 8 bits is a matrix with a scale for each block."""
    if one.scales is None:
        raise UserError(
            f"{one.file}: {name} is in 8 bits, and {name}{SCALE} with the scales of its {BLOCK} × {BLOCK} blocks is not there: quantized "
            "weights cannot be trained; get all files of the model, or its bf16 version"
        )
    entry = one.scales.entry
    wanted = scales_shape(one.entry.shape) if len(one.entry.shape) == 2 else None
    if entry.shape != wanted:
        raise UserError(
            f"{one.scales.file}: {name}{SCALE} has shape {entry.shape}; blocks of {BLOCK} × {BLOCK} of {name}, whose shape is "
            f"{one.entry.shape}, have scales of shape {wanted}"
        )
    if entry.dtype not in ("F32", "BF16"):
        raise UserError(f"{one.scales.file}: {name}{SCALE} is of type {entry.dtype}; expected F32 or BF16")
