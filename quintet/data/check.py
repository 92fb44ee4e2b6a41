"""What can be told of a recipe's data within moments: whether a built-in task's problems and the chat template are sound."""

from __future__ import annotations

from quintet.data.chat_template import check_template
from quintet.data.prompts import Which, check_rows
from quintet.recipe import Recipe


def draw_problems(recipe: Recipe, which: Which) -> None:
    """Draw one side's problems of a built-in task, as the run will."""
    check_rows(recipe.data, which, seed=recipe.run.seed)


def chat_template(recipe: Recipe) -> None:
    """Render the shortest conversation, as a run renders every prompt."""
    if recipe.data.chat:
        check_template(recipe.model.directory, recipe.model.chat_template, recipe.data.system_prompt)
