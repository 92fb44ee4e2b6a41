"""`quintet check`: is this recipe sound, and what does it say in full? Starts nothing."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import TYPE_CHECKING

from quintet.cli.command import Command
from quintet.errors import UserError

if TYPE_CHECKING:
    from quintet.plan.describe import Look
    from quintet.recipe import Recipe

MOST_SECONDS = 10**6


def run(arguments: argparse.Namespace) -> int:
    """Check the recipe and its data, print it in full to stdout and what follows from it to stderr; writes nothing. 0 sound, 2 not."""
    from quintet.recipe import dump_resolved, load_recipe
    from quintet.recipe.time_limit import TimeUp, time_limit

    command = arguments.command
    try:
        with time_limit(arguments.time_limit_s):
            recipe = load_recipe(arguments.recipe, arguments.overrides, command=command)
            notes = _look_through(_looks(recipe, command))
    except TimeUp as limit:
        raise UserError(
            f"{arguments.recipe}: {limit} did not suffice to look through it; --time-limit-s gives it more"
        ) from None
    notes += _check_data(recipe, command)
    if command in ("train", "sft"):
        from quintet.cli.saves import describe_saves

        notes += describe_saves(recipe, command)
    if arguments.verify_weights:
        notes += _verify_weights(recipe)
    print(dump_resolved(recipe), end="")
    sys.stdout.flush()
    print(
        "\n".join([f"{arguments.recipe} is a sound recipe for quintet {command}.", *notes]), file=sys.stderr
    )
    return 0


def _look_through(looks: dict[str, Look]) -> list[str]:
    """What each look has to say, and which were not taken when the time was over."""
    from quintet.recipe.time_limit import TimeUp, stop_the_clock

    notes: list[str] = []
    for number, look in enumerate(looks.values()):
        try:
            note = look()
        except TimeUp as limit:
            stop_the_clock()
            left = ", ".join(list(looks)[number:])
            return [*notes, f"Not looked through in {limit}: {left}; --time-limit-s gives it more."]
        if note is not None:
            notes.append(note)
    return notes


def _looks(recipe: Recipe, command: str) -> dict[str, Look]:
    """What is looked at within the time limit, and the look."""
    from quintet.data.check import chat_template, count_rows, needs
    from quintet.data.tasks import TASKS
    from quintet.plan import describe

    looks: dict[str, Look] = {"the chat template": lambda: chat_template(recipe)}
    looks |= describe.looks(recipe, command)
    if recipe.data.task in TASKS:
        for which in needs(recipe, command):
            name = f"{which} problems of the task {recipe.data.task}"
            looks[name] = functools.partial(count_rows, recipe, command, which)
    return looks


def _check_data(recipe: Recipe, command: str) -> list[str]:
    """What was not looked at with the recipe: the files of its data, and code that comes with the model."""
    from quintet.data.check import count_rows, needs, remote_code
    from quintet.data.tasks import TASKS

    files = [] if recipe.data.task in TASKS else needs(recipe, command)
    return [*(count_rows(recipe, command, which) for which in files), *remote_code(recipe)]


def _verify_weights(recipe: Recipe) -> list[str]:
    """Read every byte of the model's files against the checksums there are."""
    from quintet.models.checksums import verify_files
    from quintet.models.weights_on_disk import find_weights

    path = recipe.model.path
    if path is None:
        raise UserError(
            "--verify-weights: the recipe names no model.path; a model that is built has no files yet"
        )
    files = list(find_weights(path).headers)
    notes = verify_files(path, files, lambda text: print(text, file=sys.stderr, flush=True))
    return [*notes, f"Weights: {len(files) - len(notes)} of {len(files)} files verified by their checksums."]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {MOST_SECONDS:,}")
    return seconds


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--command",
        choices=["train", "sft", "generate", "eval"],
        default="train",
        help="what the recipe is checked for (default: train)",
    )
    parser.add_argument(
        "--time-limit-s",
        type=_seconds,
        default=3.0,
        metavar="SECONDS",
        help="most processor time for the recipe and the model's config.json and headers, before data are read (default: 3)",
    )
    parser.add_argument(
        "--verify-weights",
        action="store_true",
        help="also read all weights against their checksums: quintet's own, or those the hub's downloads keep",
    )


COMMAND = Command(
    name="check",
    summary="validate a recipe and print it in full; starts nothing",
    description="""\
Validate a recipe without starting any process: keys, types, the layout against the model's sizes, files, and every
row of local data files (short of tokenizing). Prints the resolved recipe, every key written out, to standard
output, and notes to standard error: the model's size, the layout with its data-parallel sizes, the layers, the
alignment of micro-batches, the memory of a rank, the data, where checkpoints go and how large one will be, and what
`resume` comes to. The resolved recipe can be used as a recipe.""",
    examples="""\
  quintet check my.yaml
  quintet check my.yaml layout.tp=4 cluster.ranks=8 > resolved.yaml
  quintet check my.yaml --command sft""",
    run=run,
    add_options=_add_options,
)
