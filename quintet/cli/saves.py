"""What `quintet check` says of checkpoints: where they go, how large one will be, and what `resume` comes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quintet.recipe import Recipe


def describe_saves(recipe: Recipe, command: str) -> Iterator[str]:
    """Describe checkpoints and what is resumed. Raises UserError when the recipe cannot go on with the run that it names."""
    from quintet.plan.describe import checkpoints
    from quintet.runs.resume import find_resume

    yield checkpoints(recipe)
    if (exports := recipe.checkpoint.hf_every_steps) > 0:
        yield f"Hugging Face directories: every {exports} steps to {recipe.run.dir}/{recipe.run.name}-<time>/hf, all kept."
    if recipe.resume is not None:
        found = find_resume(recipe, command)
        yield from found.notes
        if found.checkpoint is not None:
            manifest = found.checkpoint.manifest
            yield f"Resume: {found.run} goes on after {manifest.stage} step {manifest.step}, from {found.checkpoint.path}."
