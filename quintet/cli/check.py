"""`quintet check`: is this recipe sound, and what does it say in full? Starts nothing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quintet.cli.command import Command
from quintet.errors import UserError

if TYPE_CHECKING:
    from quintet.recipe import Recipe


def run(arguments: argparse.Namespace) -> int:
    from quintet.recipe import dump_resolved, load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides, command=arguments.command)
    notes = [_layout(recipe), *_check_data(recipe, arguments.command)]
    print(dump_resolved(recipe), end="")
    sys.stdout.flush()
    print(
        "\n".join([f"{arguments.recipe} is a sound recipe for quintet {arguments.command}.", *notes]),
        file=sys.stderr,
    )
    return 0


def _layout(recipe: Recipe) -> str:
    ranks, layout, rollout = recipe.cluster.ranks, recipe.layout, recipe.rollout.layout
    dp = ranks // (layout.tp * layout.pp * layout.cp)
    text = f"Layout: {ranks} ranks = dp {dp} × tp {layout.tp} × pp {layout.pp}"
    # As the ranks decide it: the same sizes written out are the training layout, with sp they are not.
    if rollout is None or type(layout)(tp=rollout.tp, pp=rollout.pp).model_dump() == layout.model_dump():
        return f"{text}; the rollout shares it and the weights."
    copies = ranks // (rollout.tp * rollout.pp)
    return f"{text}; rollout: dp {copies} × tp {rollout.tp} × pp {rollout.pp}, resharded each step."


def _check_data(recipe: Recipe, command: str) -> list[str]:
    """Read every row as the run will, short of rendering and tokenizing, which need the tokenizer."""
    from quintet.data.prompts import check_rows

    data, notes = recipe.data, []
    needs: dict[Literal["train", "eval"], list[str]] = {}
    if command in ("train", "sft"):
        needs["train"] = ["answer"] * (command == "train") + ["response"] * (recipe.sft is not None)
    if command in ("train", "eval") and recipe.train.eval_prompts:
        needs["eval"] = ["answer"]
    for which, columns in needs.items():
        path = data.train_path if which == "train" else data.eval_path
        if path is not None and not Path(path).exists():
            notes.append(f"Data: {path} is not a file here, taken for a hub name; its rows were not checked.")
            continue
        rows = check_rows(data, which, seed=recipe.run.seed, needs=columns)
        if not rows:
            raise UserError(f"data.{which}_path: {path} has no rows")
        notes.append(f"Data: {rows} {which} prompts in {path or f'the built-in task {data.task}'}.")
    return notes


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--command",
        choices=["train", "sft", "generate", "eval"],
        default="train",
        help="what the recipe is checked for (default: train)",
    )


COMMAND = Command(
    name="check",
    summary="validate a recipe and print it in full; starts nothing",
    description="""\
Validate a recipe without starting any process: keys, types, the layout against the model's sizes, files, and every
row of local data files (short of tokenizing). Prints the resolved recipe, every key written out, to standard
output, and notes to standard error. The resolved recipe can be used as a recipe.""",
    examples="""\
  quintet check my.yaml
  quintet check my.yaml layout.tp=4 cluster.ranks=8 > resolved.yaml
  quintet check my.yaml --command sft""",
    run=run,
    add_options=_add_options,
)
