"""Weights of a run's past: what of them is still on the disk after a given step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quintet.recipe.mtp import is_made
from quintet.recipe.schema import Recipe
from quintet.runs.checkpoints import Checkpoint, Checkpoints, Damaged, Stage, name_of
from quintet.runs.ledger import read_metrics


@dataclass(frozen=True)
class Weights:
    """The policy after `step` steps of RL. model: a Hugging Face directory; its weights are meant where checkpoint, what
    `Engine.save` wrote, is None. merged: whether adapters, if there were any, are part of the model's weights."""

    step: int
    path: Path
    model: Path
    checkpoint: Path | None = None
    merged: bool = False


def starting_model(run: Path, recipe: Recipe) -> Path:
    """Return the Hugging Face directory that the run began with."""
    if is_made(recipe):
        return run / "model"
    assert recipe.model.directory is not None
    return recipe.model.directory


def find_weights(run: Path, recipe: Recipe, step: int) -> Weights | None:
    """Return the weights after `step` steps of RL, if they are there: a checkpoint, an export, the trained model, or what RL
    began with."""
    model = starting_model(run, recipe)
    if step == 0 and recipe.sft is None:
        return Weights(0, model, model) if (model / "config.json").exists() else None
    stage: Stage = "rl" if step else "sft"
    last = _last_step(run, stage)
    name = name_of(stage, step or last)
    if (found := _checkpoint(run / "checkpoints" / name)) is not None:
        return Weights(step, found.path, model, found.policy)
    for path in (run / "hf" / name, *([run / "checkpoint"] if 0 < step == last else [])):
        if (path / "config.json").exists():
            return Weights(step, path, path, merged=True)
    return None


def _checkpoint(path: Path) -> Checkpoint | None:
    if path not in Checkpoints(path.parent).published():
        return None
    try:
        return Checkpoint.read(path)
    except Damaged:
        return None


def _last_step(run: Path, stage: Stage) -> int:
    """The last step of a stage that is recorded."""
    lines = read_metrics(run / "metrics.jsonl")
    return max((line["step"] for line in lines if line["stage"] == stage and "loss" in line), default=0)
