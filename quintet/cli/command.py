"""What a command is: a name, its help, its options besides RECIPE and key=value, and what it does."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quintet.errors import UserError

if TYPE_CHECKING:
    from quintet.recipe.schema import Recipe

_DASHED = re.compile(r"--?(?P<key>[a-z_0-9]+(?:\.\w+)+)(?P<value>=.*)?", re.DOTALL)
"""No option has a dot in its name."""


def positive(text: str) -> float:
    """Return an option's number, as argparse asks for it."""
    with suppress(ValueError):
        if 0 < (number := float(text)) <= 10**6:
            return number
    raise argparse.ArgumentTypeError(f"{text} is no number above 0 and at most {10**6:,}; write no unit")


def output_file(option: str, name: str | None) -> Path | None:
    """Return the file that an option names, if it does. Raises UserError where it cannot be written, before there is what to write."""
    if not name:
        return None
    file = Path(name)
    if not file.parent.is_dir():
        raise UserError(f"{option}: there is no directory {file.parent}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"{option}: {file} is a directory, or may not be written")
    return file


def to_train(arguments: argparse.Namespace, command: Literal["train", "sft"]) -> Recipe | None:
    """Return the recipe of a command that trains; None, and say so, where the run that it goes on with has finished."""
    from quintet.recipe.loader import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides, command=command)
    from quintet.runs.resume import nothing_left

    if (run := nothing_left(recipe, command)) is None:
        return recipe
    print(f"nothing left to do: {run} has finished. More steps go on with it; resume=null begins a new run")
    return None


def print_table(
    names: Sequence[str], rows: Iterable[Sequence[str]], to_the_left: Collection[str] = ()
) -> None:
    """Print rows in columns under their names, to the right but for those named in `to_the_left`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in to_the_left else "right")
    for row in rows:
        table.add_row(*row)
    # A file or a pipe has no width of its own.
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 180).print(table)


@dataclass(frozen=True)
class Command:
    """One command of the command line. `run` gets the parsed arguments and returns the exit code."""

    name: str
    summary: str
    """One line for `quintet --help`."""
    description: str
    examples: str
    run: Callable[[argparse.Namespace], int]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    usage: str = "RECIPE.yaml [key=value ...] [options]"
    takes: tuple[str, str] = ("RECIPE.yaml", "the recipe file, or a model's directory")
    """What comes before key=value, and its help."""
    codes: str = (
        "0 done, 2 something to put right, 3 a worker failed or was not reached, 5 a rollout has other weights than the trainer, "
        "6 rollout and trainer parted, 130 Ctrl-C, 143 SIGTERM"
    )
    """Exit codes, for the help."""
    of_recipe: bool = True
    """Whether it takes key=value, among which options may stand anywhere, and `takes` before."""

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of RECIPE, overrides and the command's own options."""
        parser = argparse.ArgumentParser(
            prog=f"quintet {self.name}",
            usage=f"quintet {self.name} {self.usage}",
            description=self.description,
            epilog=f"examples:\n{self.examples}\n\nexit codes: {self.codes}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if self.of_recipe:
            metavar, said = self.takes
            parser.add_argument(metavar.partition(".")[0].lower(), metavar=metavar, help=said)
            parser.add_argument(
                "overrides",
                metavar="key=value",
                nargs="*",
                default=[],  # argparse calls it required otherwise
                help="set any key of the recipe; the value is YAML: train.steps=10 rollout.stop='[\"\\n\"]' sft=null",
            )
        self.add_options(parser)
        return parser

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments of a command; bad options end the program with code 2. Raises UserError for a key with dashes."""
        for one in arguments:
            if self.of_recipe and (dashed := _DASHED.match(one)):
                key, value = dashed["key"], dashed["value"] or "=…"
                raise UserError(f"{one}: keys of a recipe are set without dashes: {key}{value}")
        parser = self.parser()
        return (parser.parse_intermixed_args if self.of_recipe else parser.parse_args)(list(arguments))
