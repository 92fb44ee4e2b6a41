"""What a command is: a name, its help, its options besides RECIPE and key=value, and what it does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
    codes: str = (
        "0 done, 2 something to put right, 3 a worker failed or was not reached, 5 a rollout has other weights than the trainer, "
        "6 rollout and trainer parted, 130 Ctrl-C, 143 SIGTERM"
    )
    """Exit codes, for the help."""
    of_recipe: bool = True
    """Whether it takes RECIPE and key=value, among which options may stand anywhere."""

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
            parser.add_argument("recipe", metavar="RECIPE.yaml", help="the recipe file")
            parser.add_argument(
                "overrides",
                metavar="key=value",
                nargs="*",
                help="set any key of the recipe; the value is YAML: train.steps=10 rollout.stop='[\"\\n\"]' sft=null",
            )
        self.add_options(parser)
        return parser

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments of a command; bad options end the program with code 2."""
        parser = self.parser()
        return (parser.parse_intermixed_args if self.of_recipe else parser.parse_args)(list(arguments))
