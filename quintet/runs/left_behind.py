"""What a run leaves, as lines to be read at its end: where everything is, and how one that was cut off goes on."""

from __future__ import annotations

import shlex

from quintet.recipe.schema import Recipe
from quintet.runs.checkpoints import Checkpoints, adapter_directory
from quintet.runs.directory import RunDirectory


def where_to_look(directory: RunDirectory, cut_off: Recipe | None = None) -> list[str]:
    """Return the lines that say where the run's results are and how to open them; only what exists. cut_off: of a run that has not
    finished, which says also what it left to go on from, and the command that does, once anything was recorded."""
    if not (directory.metrics.exists() and directory.metrics.stat().st_size):
        cut_off = None
    lines = [f"run directory   {directory.path}"]
    if directory.checkpoint.exists():
        lines.append(f"trained model   {directory.checkpoint}")
    elif cut_off is not None:
        exports = sorted(path.name for path in directory.hf.glob("*") if not path.name.endswith("-adapter"))
        newest = f"; the last export is {directory.hf / exports[-1]}" if exports else ""
        lines.append(f"trained model   none was written{newest}")
    if (adapter := adapter_directory(directory.checkpoint)).exists():
        lines.append(f"adapter         {adapter} (the model above has it merged)")
    if directory.report.exists():
        lines.append(f"report          open {directory.report} in a browser")
    return lines if cut_off is None else [*lines, *_to_go_on(directory, cut_off.checkpoint.every_steps)]


def _to_go_on(directory: RunDirectory, every_steps: int) -> list[str]:
    found, _ = Checkpoints(directory.checkpoints).latest()
    if found is None:
        more = "" if every_steps else "; checkpoint.every_steps=20 would save some"
        return [f"checkpoint      none, so there is nothing to go on from{more}"]
    command = ["quintet", found.manifest.command, str(directory.recipe), f"resume={directory.path}"]
    return [
        f"checkpoint      {found.path}, after {found.manifest.stage} step {found.manifest.step}",
        f"to go on        {shlex.join(command)}",
    ]
