"""report.html: a run at a glance, in one file that needs nothing else.

It is made from what lies in the run directory, so it can be made for a run that was cut off anywhere.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from quintet.errors import UserError
from quintet.observe.report.page import Run, page
from quintet.observe.summary import RUNNING, summarize
from quintet.recipe.schema import BuildModel, Model, Recipe, Rollout, RolloutLayout, Sft
from quintet.recipe.yaml_text import read_yaml
from quintet.runs.directory import RunDirectory
from quintet.runs.fsync import write_whole
from quintet.runs.ledger import read_json, read_jsonl, read_metrics

__all__ = ["make_anew", "write_report"]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory and return its path; whatever is missing there is left out."""
    directory = RunDirectory(Path(run_dir))
    run = Run(
        name=directory.path.resolve().name,
        lines=read_metrics(directory.metrics),
        summary=read_json(directory.summary),
        samples=read_jsonl(directory.samples),
        environment=read_json(directory.environment),
        recipe=_recipe_lines(directory.recipe),
    )
    write_whole(directory.report, page(run).encode())
    return directory.report


def make_anew(run_dir: Path) -> Path:
    """Write `summary.json` and `report.html` of a run whose process is gone anew, from what it recorded, and return the report's path.

    A run that ended without a word is "unfinished" in them. Raises UserError for what is no run directory, OSError where it cannot be
    written.
    """
    directory = RunDirectory.begun(run_dir)
    told, lines = {"status": RUNNING} | read_json(directory.summary), read_metrics(directory.metrics)
    by_phase, total = dict(told.get("seconds_by_phase") or {}), float(told.get("seconds_total") or 0)
    for line in lines[told.get("ledger_lines", 0) :]:  # written since the summary
        seconds = {key[8:]: float(value or 0) for key, value in line.items() if key.startswith("seconds/")}
        total += seconds.pop("step", sum(seconds.values()))
        by_phase |= {phase: by_phase.get(phase, 0.0) + more for phase, more in seconds.items()}
    status = str(told["status"]).replace(RUNNING, "unfinished")
    directory.write_summary(told | summarize(lines, total, by_phase) | {"status": status})
    return write_report(run_dir)


def _recipe_lines(path: Path) -> list[tuple[str, bool]]:
    """Lines of the resolved recipe, and whether the key on each has another value than its default."""
    try:
        return _marked(path.read_text(encoding="utf-8"))
    except (OSError, UserError):
        return []


@lru_cache(maxsize=1)  # a run writes its report again and again
def _marked(text: str) -> list[tuple[str, bool]]:
    document = read_yaml(text, "recipe.yaml")
    absent = Recipe()
    # A section that is absent by default is compared with its own defaults when it is given.
    present = Recipe(model=Model(build=BuildModel()), rollout=Rollout(layout=RolloutLayout()), sft=Sft())
    defaults = [recipe.model_dump(mode="json") for recipe in (absent, present)]
    given = {
        line
        for key, line in document.lines.items()
        if not isinstance(value := _at(document.data, key), dict)
        and all(value != _at(default, key) for default in defaults)
    }
    return [(line, number in given) for number, line in enumerate(text.rstrip("\n").split("\n"), start=1)]


def _at(data: Any, key: tuple[str, ...]) -> Any:
    for part in key:
        data = data.get(part) if isinstance(data, dict) else None
    return data
