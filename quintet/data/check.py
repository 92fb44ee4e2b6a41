"""What can be told of a recipe's data before a run: whether rows and chat template are sound, what code a tokenizer brings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from quintet.data.chat_template import check_template
from quintet.data.prompts import check_rows
from quintet.data.tokenizer import code_of_tokenizer, load_tokenizer, remote_code_warning
from quintet.errors import UserError
from quintet.recipe import Recipe


def needs(recipe: Recipe, command: str) -> dict[Literal["train", "eval"], list[str]]:
    """Return the sides of the data that the command reads, and the columns besides the prompt."""
    found: dict[Literal["train", "eval"], list[str]] = {}
    if command in ("train", "sft"):
        found["train"] = ["answer"] * (command == "train") + ["response"] * (recipe.sft is not None)
    if command in ("train", "eval") and recipe.train.eval_prompts:
        found["eval"] = ["answer"]
    return found


def count_rows(recipe: Recipe, command: str, which: Literal["train", "eval"]) -> str:
    """Read every row of one side as the run will, short of rendering and tokenizing, which need the tokenizer; say how many."""
    data = recipe.data
    path = data.train_path if which == "train" else data.eval_path
    if path is not None and not Path(path).exists():
        return f"Data: {path} is not a file here, taken for a hub name; its rows were not checked."
    rows = check_rows(data, which, seed=recipe.run.seed, needs=needs(recipe, command)[which])
    if not rows:
        raise UserError(f"data.{which}_path: {path} has no rows")
    return f"Data: {rows} {which} prompts in {path or f'the built-in task {data.task}'}."


def chat_template(recipe: Recipe) -> None:
    """Render the shortest conversation, as a run renders every prompt."""
    if recipe.data.chat:
        check_template(recipe.model.path, recipe.model.chat_template, recipe.data.system_prompt)


def remote_code(recipe: Recipe) -> list[str]:
    """Return what is to be said of code that comes with the model, which is not run here. Raises UserError where it would be
    needed."""
    path = recipe.model.path
    if path is None:
        return []
    if recipe.model.trust_remote_code:
        return [remote_code_warning(path)]
    if code_of_tokenizer(path) is not None:  # else not worth the seconds that transformers takes to import
        load_tokenizer(path)
    return []
