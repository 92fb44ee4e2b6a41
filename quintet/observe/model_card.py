"""The model card of a run: what was trained from what, by which recipe, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintet.errors import UserError, reading
from quintet.install import DISTRIBUTION
from quintet.observe.summary import rows
from quintet.recipe.schema import Recipe
from quintet.recipe.yaml_text import read_yaml, write_yaml
from quintet.runs.directory import RunDirectory

_OF_MACHINES = ("cluster", "resume")
"""Sections that say nothing of the model, and name machines."""


def model_card(run: Path) -> str:
    """Return the card of a run's model, Markdown with the front matter that the hub reads.

    Of absolute paths there are but the names. Raises UserError for a run whose recipe cannot be read.
    """
    directory = RunDirectory(run)
    with reading(directory.recipe):
        data = read_yaml(directory.recipe.read_text(encoding="utf-8"), str(directory.recipe)).data
    try:
        recipe = Recipe.model_validate(data)
    except ValueError as error:
        raise UserError(f"{directory.recipe}: of another version of quintet ({error})") from None
    summary, environment = _json(directory.summary), _json(directory.environment)
    given = {
        section: keys
        for section, keys in recipe.model_dump(mode="json", exclude_defaults=True).items()
        if section not in _OF_MACHINES
    }
    return _FORM.format(
        head=write_yaml(_head(recipe)),
        name=recipe.run.name,
        base=_base(recipe),
        how=_how(recipe, summary),
        results=_results(recipe, summary),
        recipe=write_yaml(_without_places(given)),
        versions=", ".join(f"{name} {one}" for name, one in environment.get("versions", {}).items()),
    )


_FORM = f"""\
---
{{head}}---
# {{name}}

{{base}}, trained with quintet ({DISTRIBUTION}): {{how}}.

## Results

{{results}}

## Recipe

All keys that are not at their defaults:

```yaml
{{recipe}}```

Versions: {{versions}}.
"""


def _head(recipe: Recipe) -> dict[str, Any]:
    method = recipe.algorithm.name
    head: dict[str, Any] = {
        "library_name": "transformers",
        "tags": ["quintet", "reinforcement-learning", method],
    }
    return head | ({"base_model": str(recipe.model.path)} if recipe.model.of_hub else {})


def _base(recipe: Recipe) -> str:
    model = recipe.model
    if model.path is None:
        return "A model built from nothing"
    return f"{model.path} at revision {model.revision}" if model.of_hub else model.path.name


def _how(recipe: Recipe, summary: Mapping[str, Any]) -> str:
    warm_up = f"{summary['sft_steps']} steps of SFT, then " if summary.get("sft_steps") else ""
    adapters = ", low-rank adapters alone" if recipe.lora is not None else ""
    return f"{warm_up}{summary.get('steps', 0)} steps of {recipe.algorithm.name}{adapters}"


def _results(recipe: Recipe, summary: Mapping[str, Any]) -> str:
    found = rows(summary)
    if not found:
        return "The run was not evaluated."
    lines = [f"| {row.label} | {row.before} | {row.after} | {row.change} |" for row in found]
    where = _without_places(recipe.data.eval_path) or f"the task {recipe.data.task}"
    return "\n".join(
        [
            f"Held-out prompts: {recipe.train.eval_prompts} of {where}. Reward: {_without_places(recipe.reward.function)}.",
            "",
            "| | before | after | change |",
            "|---|---|---|---|",
            *lines,
        ]
    )


def _without_places(value: Any) -> Any:
    """The value without the directories that absolute paths in it lead through."""
    if isinstance(value, dict):
        return {key: _without_places(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_places(one) for one in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _json(file: Path) -> dict[str, Any]:
    with reading(file):
        value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return value
