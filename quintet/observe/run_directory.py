"""The run directory: everything a run leaves behind, under fixed names."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from quintet.errors import UserError
from quintet.recipe import Recipe, dump_resolved

PACKAGES = (
    "quintet",
    "torch",
    "megatron-core",
    "transformers",
    "ray",
    "tensordict",
    "pydantic",
    "vllm",
    "sglang",
)


class RunDirectory:
    """Paths and writers of one run's directory.

    `checkpoint` is where the trained model goes, as a Hugging Face directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.summary = path / "summary.json"
        self.environment = path / "environment.json"
        self.report = path / "report.html"
        self.checkpoint = path / "checkpoint"

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
        directory = cls(path)
        directory.recipe.write_text(dump_resolved(recipe), encoding="utf-8")
        directory.environment.write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
        return directory

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append samples of a step: mappings such as prompt, response, answer, reward."""
        with self.samples.open("a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps({"step": step, **sample}, ensure_ascii=False, default=str) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json in one move, so that a reader never sees half of it."""
        draft = self.summary.with_suffix(".json.part")
        draft.write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
        draft.replace(self.summary)


def environment() -> dict[str, Any]:
    """What the run ran on: versions, machine, command line."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "versions": versions,
    }
