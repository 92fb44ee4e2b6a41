"""The checkpoints of a run, as directories: which there are, which are whole, and how one more comes to be.

A checkpoint is RUN/checkpoints/step-000012/ (sft-000012/ in SFT) with `policy/`, which the ranks write, and
`manifest.json`, which comes last: written under another name, on the disk with everything it lists, and then renamed.
A rename happens or does not, so a save that was cut off anywhere leaves a directory without a manifest, which is no
checkpoint, and harms none. Here is no torch: the controller, `quintet check` and a user's script can look.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from quintet.runs.fsync import fsync_path

MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"
"""Below what the ranks write: it comes last of all."""
POLICY = "policy"
"""Below a checkpoint: what `Engine.save` wrote."""
CRITIC = "critic"
"""Beside it: what learns with the policy."""
REFERENCE = "reference"
"""Beside the checkpoints: the reference policy, where it is not the model that the recipe names."""

Stage = Literal["sft", "rl"]
_PREFIX: dict[Stage, str] = {"sft": "sft", "rl": "step"}
_NAME = re.compile(r"(sft|step)-(\d{6,})")


class Clock(BaseModel):
    """Seconds of a run, up to its checkpoint and over all its starts."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    seconds: float = 0.0
    by_phase: dict[str, float] = {}


class Manifest(BaseModel):
    """What a checkpoint is, beside the ranks' files: all the controller needs to go on."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    format: Literal[1] = 1
    command: Literal["train", "sft"]
    stage: Stage
    step: NonNegativeInt
    """The last step that is in it."""
    layout: dict[str, Any]
    """Of the ranks that wrote it, with their number: `layout` of the recipe, and `ranks`."""
    dtype: Literal["fp32", "bf16"]
    data: dict[str, Any]
    """`PromptStream.state_dict()`: where the order of prompts goes on."""
    loop: dict[str, float]
    """Numbers that the stage's loop carries from step to step."""
    reference: str | None = None
    """Where the reference policy is, from the checkpoint; null for the recipe's model, or where none is needed."""
    weights: str | None = None
    """Fingerprint of the recipe's model, where it is the reference policy and is read again."""
    clock: Clock = Clock()
    recipe: dict[str, Any]
    """The resolved recipe, every key."""
    versions: dict[str, str]
    saved: str
    """Local time."""
    files: dict[str, NonNegativeInt] = {}
    """Bytes of each file, by its path below the checkpoint."""
    crc32: int | None = None
    """Of all else in the file, as `_crc32` writes it; null in a manifest of a version that wrote none."""

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint whose files are there."""

    path: Path
    manifest: Manifest

    @property
    def policy(self) -> Path:
        return self.path / POLICY

    @property
    def reference(self) -> Path | None:
        """What was written of the reference policy, if it is stored."""
        name = self.manifest.reference
        return None if name is None else Path(os.path.normpath(self.path / name)) / POLICY

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the checkpoint in a directory. Raises Damaged with the reason when it is not whole. For the reference policy
        there is `check_reference`."""
        return cls(path, _read_manifest(path))

    def check_reference(self) -> None:
        """Raise Damaged with the reason when the stored reference policy, which others need as well, is not whole."""
        if self.reference is not None:
            _read_manifest(self.reference.parent)


class Damaged(Exception):
    """A directory that is no whole checkpoint; the text says why."""


def name_of(stage: Stage, step: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"{_PREFIX[stage]}-{step:06d}"


def place_of(stage: str, step: int) -> tuple[int, int]:
    """Return where in the run a step is, to sort by: SFT comes before RL."""
    return (0 if stage == "sft" else 1), step


def later_than(checkpoint: Checkpoint, directory: Path) -> list[Path]:
    """Return the directories in `directory` that are named after later steps than a checkpoint's, the newest first."""
    mine = place_of(checkpoint.manifest.stage, checkpoint.manifest.step)
    return [path for place, path in _named(directory) if place > mine]


def adapter_directory(model: Path) -> Path:
    """Return where the adapters of a saved model are: adapter/ beside checkpoint/, step-000012-adapter/ beside step-000012/."""
    return model.with_name("adapter" if model.name == "checkpoint" else f"{model.name}-adapter")


class Checkpoints:
    """The checkpoints of a run, in RUN/checkpoints. One process writes there: who holds the run directory's lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def begin(self, name: str) -> Path:
        """Make the directory of a new checkpoint, after removing what earlier saves left unfinished.

        Raises OSError.
        """
        for leftover in self._unfinished():
            shutil.rmtree(leftover)
        path = self.directory / name
        path.mkdir(parents=True)
        return path

    def publish(self, path: Path, manifest: Manifest) -> Checkpoint:
        """Make `path` a checkpoint: list its files, write the manifest, and give it its name in one move.

        Raises OSError, with nothing published.
        """
        manifest = manifest.model_copy(update={"files": _sizes(path)})
        part = path / f"{MANIFEST}.part"
        with part.open("w", encoding="utf-8") as file:
            content = json.loads(manifest.model_dump_json(exclude={"crc32"}))
            file.write(json.dumps(content | {"crc32": _crc32(content)}, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for directory in {path, *(p.parent for p in path.rglob("*"))}:
            fsync_path(directory)
        part.rename(path / MANIFEST)
        try:
            fsync_path(path)
            fsync_path(self.directory)
        except OSError:
            (path / MANIFEST).unlink()
            raise
        return Checkpoint(path, manifest)

    def discard(self, path: Path) -> None:
        """Remove a directory that was begun and will not be published; what cannot be removed goes at the next save.

        One that is published is left alone.
        """
        if not (path / MANIFEST).exists():
            shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Remove published checkpoints but for the `keep` newest."""
        for path in self.published()[keep:]:
            # Without its manifest it is no checkpoint, however far the removal of the rest gets.
            (path / MANIFEST).unlink()
            fsync_path(path)
            shutil.rmtree(path, ignore_errors=True)

    def published(self) -> list[Path]:
        """Return the directories with a manifest, the newest first; whether they are whole is not looked at."""
        return [path for path in self._all() if (path / MANIFEST).exists()]

    def latest(self, damaged: Mapping[Path, str] | None = None) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that is whole, and what was wrong with those newer than it.

        damaged: of which it is known already, with what is wrong: files of the right size are not looked into here.
        """
        skipped: list[str] = []
        for path in self._all():
            try:
                if damaged and path in damaged:
                    raise Damaged(damaged[path])
                return Checkpoint.read(path), skipped
            except Damaged as reason:
                skipped.append(f"{path.name}: {reason}")
        return None, skipped

    def before(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Return the newest whole checkpoint of an earlier step."""
        mine = place_of(checkpoint.manifest.stage, checkpoint.manifest.step)
        for place, path in _named(self.directory):
            if place < mine:
                with contextlib.suppress(Damaged):
                    return Checkpoint.read(path)
        return None

    def newer_than(self, checkpoint: Checkpoint) -> list[Path]:
        """Return published directories of later steps, and a reference policy that is stored only later."""
        newer = [path for path in later_than(checkpoint, self.directory) if (path / MANIFEST).exists()]
        stored = self.directory / REFERENCE
        if checkpoint.manifest.stage == "sft" and (stored / MANIFEST).exists():
            newer.append(stored)
        return newer

    def _all(self) -> list[Path]:
        """Directories that are or were to be checkpoints, the newest first."""
        return [path for _, path in _named(self.directory)]

    def _unfinished(self) -> Iterator[Path]:
        for path in [*self._all(), self.directory / REFERENCE]:
            if path.is_dir() and not (path / MANIFEST).exists():
                yield path


def _named(directory: Path) -> list[tuple[tuple[int, int], Path]]:
    """Directories that are named after a step, with its place in the run, the newest first."""
    found = [
        (place_of("sft" if named[1] == "sft" else "rl", int(named[2])), path)
        for path in (directory.iterdir() if directory.is_dir() else ())
        if (named := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, reverse=True)


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        data = file.read_bytes()
        manifest = Manifest.model_validate_json(data, strict=True)
    except FileNotFoundError:
        unfinished = f"no {MANIFEST}: its save was not finished" if path.is_dir() else f"there is no {path}"
        raise Damaged(unfinished) from None
    except OSError as error:
        raise Damaged(f"{file.name} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        if first["loc"] == ("format",) and isinstance(first["input"], int):
            raise Damaged(f"{file.name} has format {first['input']}, and this quintet reads 1") from None
        raise Damaged(f"{file.name} is damaged ({where}: {first['msg']})") from None
    if manifest.crc32 not in (None, _crc32(json.loads(data))):
        raise Damaged(f"{file.name} is damaged: its checksum is not the one it was written with")
    for name, size in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        if found != size:
            raise Damaged(f"{name} has {found} bytes instead of {size}")
    return manifest


def _crc32(manifest: dict[str, Any]) -> int:
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _sizes(path: Path) -> dict[str, int]:
    files = sorted(one for one in path.rglob("*") if one.is_file())
    return {str(one.relative_to(path)): one.stat().st_size for one in files}
