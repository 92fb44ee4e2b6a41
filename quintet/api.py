"""quintet from Python: what `quintet train` and `quintet generate` do, and the results of a run as plain data.

The guide is docs/api.md. Errors that a user can mend are `quintet.errors.UserError`, as on the command line.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.data.prompts import Messages
from quintet.errors import UserError
from quintet.recipe.loader import load_recipe
from quintet.runs.directory import RunDirectory
from quintet.runs.ledger import read_jsonl, read_metrics

__all__ = ["Run", "generate", "train"]


@dataclass(frozen=True)
class Run:
    """The results of a run, finished or under way: each property reads its file of the run directory anew.

    Raises UserError for a directory that no run wrote.
    """

    directory: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory).expanduser())
        RunDirectory.begun(self.directory)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl, one a step or evaluation: `stage` ("sft" or "rl"), `step`, and numbers or None."""
        return read_metrics(self.directory / "metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Rows of samples.jsonl: `step`, `prompt`, `response`, `answer`, `reward`, and what else the reward told."""
        return read_jsonl(self.directory / "samples.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json; {} while there is none yet."""
        file = self.directory / "summary.json"
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}

    @property
    def checkpoint(self) -> Path:
        """The trained model, a Hugging Face directory once the run has finished."""
        return self.directory / "checkpoint"

    def _repr_html_(self) -> str:
        """The report, where a notebook shows the run."""
        file = self.directory / "report.html"
        if not file.exists():
            return f"{html.escape(str(self.directory))}: no report yet"
        report = html.escape(file.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{report}" style="width: 100%; height: 45em; border: 0"></iframe>'


def train(recipe: str | Path, **overrides: Any) -> Run:
    """Train by a recipe as `quintet train` does, and return the run, also where nothing is left to do of one that goes on.

    Args:
        recipe: YAML file, or `recipes/NAME.yaml` of those that come with quintet.
        overrides: keys of the recipe: a section with a dict of its keys, `train={"steps": 10}`, None for a section that is
            to be left out, or dotted keys, `**{"train.steps": 10}`.

    Raises:
        UserError: the recipe or what it names is not sound; and what else ends `quintet train`, `quintet.errors`.
    """
    loaded = load_recipe(recipe, _overrides(overrides), command="train")
    from quintet.runs.resume import nothing_left

    if (finished := nothing_left(loaded, "train")) is not None:
        return Run(finished)
    from quintet.train.ppo import train as run

    return Run(run(loaded))


def generate(
    checkpoint: Run | str | Path, prompts: Sequence[str | Messages], **overrides: Any
) -> list[dict[str, Any]]:
    """Return responses of a model, one dict a sample with `prompt`, `response`, `response_tokens`, `finish` and sums of log-probs.

    Args:
        checkpoint: Hugging Face directory, such as a run's `checkpoint`, or the run itself.
        prompts: texts, or conversations: lists of {"role": …, "content": …}. The chat template renders both, unless
            `data={"chat": False}`.
        overrides: keys of a recipe, as for `train`: `rollout={"temperature": 0, "max_response_tokens": 64}`. One sample a
            prompt unless `rollout.samples_per_prompt` says otherwise.

    Raises:
        UserError: no such model, or prompts that it cannot read.
    """
    if isinstance(prompts, str):
        raise UserError(f"api.generate takes a list of prompts; of one alone it is [{prompts!r:.80}]")
    model = checkpoint.checkpoint if isinstance(checkpoint, Run) else checkpoint
    given = {"model": {"path": model}, "rollout": {"samples_per_prompt": 1}}
    loaded = load_recipe(None, [*_overrides(given), *_overrides(overrides)], command="generate")
    if not prompts:
        return []
    from quintet.train.generate import generate as run

    return run(loaded, prompts)


def _overrides(given: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Keys of sections as `load_recipe` takes them: JSON is YAML."""
    for key, value in given.items():
        if isinstance(value, Mapping) and value:
            yield from _overrides(value, f"{above}{key}.")
        else:
            yield f"{above}{key}={json.dumps(value, ensure_ascii=False, default=str)}"
