"""What `quintet check` says of checkpoints: where they go, how large one will be, and what `resume` comes to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quintet.recipe import Recipe


def describe_saves(recipe: Recipe, command: str) -> Iterator[str]:
    """Raises UserError when the recipe cannot go on with the run that it names."""
    from quintet.runs.resume import find_resume

    yield _checkpoints(recipe)
    if (exports := recipe.checkpoint.hf_every_steps) > 0:
        yield f"Hugging Face directories: every {exports} steps to {recipe.run.dir}/{recipe.run.name}-<time>/hf, all kept."
    if recipe.resume is not None:
        found = find_resume(recipe, command)
        yield from found.notes
        if found.checkpoint is not None:
            manifest = found.checkpoint.manifest
            yield f"Resume: {found.run} goes on after {manifest.stage} step {manifest.step}, from {found.checkpoint.path}."


def _checkpoints(recipe: Recipe) -> str:
    from quintet.plan import checkpoint_bytes
    from quintet.recipe.rules import shape_of

    settings = recipe.checkpoint
    if not settings.every_steps:
        return "Checkpoints: none to resume from (checkpoint.every_steps=0); the trained model is saved at the end."
    where = f"{recipe.run.dir}/{recipe.run.name}-<time>/checkpoints"
    text = f"Checkpoints: every {settings.every_steps} steps to {where}, the newest {settings.keep_last} kept"
    shape = shape_of(recipe)
    if shape is None or recipe.model.path is None:  # the vocabulary of a built model is not known yet
        return f"{text}."
    dtype = recipe.model.dtype or ("fp32" if recipe.cluster.device == "cpu" else "bf16")
    size = checkpoint_bytes(recipe, shape, dtype)
    # One more is written before the oldest goes.
    most, free = size * (settings.keep_last + 1), _free(recipe.run.dir)
    text += f"; one takes about {size / _GIB:.1f} GiB, all up to {most / _GIB:.1f} GiB"
    if free < most:
        return f"{text}: warning, {free / _GIB:.1f} GiB are free there."
    return f"{text} of the {free / _GIB:.0f} GiB that are free there."


_GIB = 1 << 30


def _free(path: Path) -> int:
    """Of the file system that `path` is, or will be, on."""
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    return shutil.disk_usage(there).free
