"""The run directory: everything a run leaves behind, under fixed names."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from quintet.errors import UserError, writing
from quintet.install import DISTRIBUTION
from quintet.recipe.loader import dump_resolved
from quintet.recipe.schema import Recipe
from quintet.runs.checkpoints import name_of, place_of
from quintet.runs.fsync import write_whole
from quintet.runs.ledger import append, open_to_append
from quintet.runs.lock import LOCK, RunLock

PACKAGES = (
    DISTRIBUTION,
    "torch",
    "megatron-core",
    "transformers",
    "ray",
    "tensordict",
    "pydantic",
    "vllm",
    "sglang",
)


REPLAYS = 16
"""Steps whose samples for replay are kept in any case."""


def check_writable(directory: Path) -> None:
    """Raise UserError where run directories cannot be made below `directory`; nothing is left behind."""
    there = next(one for one in (directory.absolute(), *directory.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise UserError(
            f"run.dir: no directory can be made in {there}: {error.strerror}; name another"
        ) from None


class RunDirectory:
    """Paths and writers of one run's directory.

    `checkpoint` is where the trained model goes, as a Hugging Face directory, `hf` where it goes during the run, and
    `checkpoints` where the state of training goes. `lock` is None where nothing else can get at the directory.
    """

    def __init__(self, path: Path, lock: RunLock | None = None) -> None:
        self.path, self.lock = path, lock
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.replay = path / "replay"
        self.summary = path / "summary.json"
        self.environment = path / "environment.json"
        self.chat_template = path / "chat_template.jinja"
        self.report = path / "report.html"
        self.checkpoint = path / "checkpoint"
        self.checkpoints = path / "checkpoints"
        self.hf = path / "hf"

    @classmethod
    def begun(cls, path: Path) -> RunDirectory:
        """Return the directory of a run that has begun. Raises UserError for one that no run wrote."""
        directory = cls(path)
        if not directory.recipe.is_file():
            raise UserError(f"{path} is no run directory: there is no {directory.recipe.name} in it")
        return directory

    @classmethod
    def create(cls, recipe: Recipe) -> RunDirectory:
        """Make `run.dir/run.name-<time>` with the resolved recipe and the versions of what runs.

        Raises UserError when the directory cannot be made.
        """
        name = f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for attempt in range(1, 1000):
            path = recipe.run.dir / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise UserError(f"run.dir: cannot make {path}: {error.strerror}") from None
            break
        else:
            raise UserError(f"run.dir: {recipe.run.dir} already holds a thousand runs named {name}")
        directory = cls(path, RunLock(path / LOCK))
        with writing(f"run.dir: {path}"):
            directory._describe(recipe)
        return directory

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """Return the directory of a run that is to go on. Raises UserError when another process uses it."""
        return cls(path, RunLock(path / LOCK))

    def cut_back(self, recipe: Recipe, stage: str, step: int, later: Iterable[Path] = ()) -> Path:
        """Go on after `step`: what was recorded later is cut off and set aside, and `recipe` is what holds from now.

        later: what was made since, below this directory, to be set aside as well. Returns where all of it goes,
        `set_aside/<n>` of the n-th time. The recipe, the environment and the
        summary of the start before are there too. Raises UserError when the disk does not take what is set aside.
        """
        try:
            return self._cut_back(recipe, stage, step, later)
        except OSError as error:
            raise UserError(
                f"{error.filename or self.path} cannot be written: {error.strerror}; make room, or the directory writable"
            ) from None

    def _cut_back(self, recipe: Recipe, stage: str, step: int, later: Iterable[Path]) -> Path:
        number = 1 + max((int(p.name) for p in self._set_aside()), default=0)
        aside = self.path / "set_aside" / str(number)
        aside.mkdir(parents=True)
        # First the checkpoints: cut off in between, the next start finds the same one, and cuts the records then.
        for path in later:
            target = aside / path.relative_to(self.path)
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
        place = place_of(stage, step)
        _cut(self.metrics, aside, lambda line: place_of(line["stage"], line["step"]) <= place)
        _cut(self.samples, aside, lambda line: place_of("rl", line["step"]) <= place)
        for of_step, file in replays(self.path).items():
            if place_of("rl", of_step) > place:
                (aside / self.replay.name).mkdir(exist_ok=True)
                file.rename(aside / self.replay.name / file.name)
        for file in (self.recipe, self.environment, self.summary, self.report):
            if file.exists():
                file.rename(aside / file.name)
        self._describe(recipe)
        return aside

    def _describe(self, recipe: Recipe) -> None:
        """Write the resolved recipe and the versions of what runs."""
        self.recipe.write_text(dump_resolved(recipe), encoding="utf-8")
        self.environment.write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")

    def keep_chat_template(self, text: str) -> None:
        """Write the chat template that prompts are made with. Raises UserError when a run would go on with another one."""
        before = self.chat_template.read_bytes().decode() if self.chat_template.is_file() else None
        if before not in (None, text):
            raise UserError(
                f"model.chat_template: it is not what the run began with, which is in {self.chat_template}; name that one, or begin "
                "a new run (resume=null)"
            )
        with writing(f"run.dir: {self.chat_template}"):
            self.chat_template.write_bytes(text.encode())

    def starts(self) -> list[str]:
        """Return when the run was started, and each time that it went on."""
        files = [p / self.environment.name for p in self._set_aside()] + [self.environment]
        return [json.loads(one.read_text(encoding="utf-8"))["started"] for one in files if one.exists()]

    def _set_aside(self) -> list[Path]:
        found = (p for p in (self.path / "set_aside").glob("*") if p.name.isdigit())
        return sorted(found, key=lambda p: int(p.name))

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append samples of a step: mappings such as prompt, response, answer, reward."""
        lines = (json.dumps({"step": step, **one}, ensure_ascii=False, default=str) + "\n" for one in samples)
        with open_to_append(self.samples) as file:
            append(file, "".join(lines).encode())

    def write_replay(self, step: int, data: bytes) -> None:
        """Write a step's samples for replay, and remove those of earlier steps that nothing can be replayed with any more:
        all but the newest REPLAYS, and those whose weights are there. Raises UserError when the disk does not take it.
        """
        file = self.replay / replay_name(step)
        with writing(file):
            self.replay.mkdir(exist_ok=True)
            write_whole(file, data)
            for old, path in list(replays(self.path).items())[:-REPLAYS]:
                if not self._has_weights(old - 1):
                    path.unlink()

    def _has_weights(self, step: int) -> bool:
        """Whether the weights after a step are there: those before the first are what the run began with."""
        name = name_of("rl", step)
        return step == 0 or (self.checkpoints / name).is_dir() or (self.hf / name).is_dir()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json in one move, so that a reader never sees half of it."""
        write_whole(self.summary, (json.dumps(summary, indent=2, default=str) + "\n").encode())


def replay_name(step: int) -> str:
    """Return the name of the file with a step's samples for replay."""
    return f"{name_of('rl', step)}.safetensors"


def replays(run: Path) -> dict[int, Path]:
    """Return the files with samples for replay of a run directory, by step, the oldest first."""
    files = (run / "replay").glob("step-*.safetensors")
    found = {int(number): file for file in files if (number := file.stem[5:]).isdecimal()}
    return dict(sorted(found.items()))


def _cut(file: Path, aside: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Move lines that are not to be kept, and those that are not whole, to a file of the same name in `aside`."""
    if not file.exists():
        return
    kept: list[bytes] = []
    cut: list[bytes] = []
    for line in file.read_bytes().splitlines(keepends=True):
        try:
            mine = line.endswith(b"\n") and keep(json.loads(line))
        except (ValueError, TypeError, KeyError):
            mine = False
        (kept if mine else cut).append(line)
    if cut:
        # First what is set aside, then what stays: cut off in between, lines are there twice and none is lost.
        (aside / file.name).write_bytes(b"".join(cut))
        write_whole(file, b"".join(kept))


def environment() -> dict[str, Any]:
    """Return what the run ran on: versions, machine, command line."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "quintet"), *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "versions": package_versions(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a run computes, of those that are installed."""
    versions = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
