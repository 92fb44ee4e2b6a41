"""`quintet generate`: responses of a model to given prompts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from quintet.cli.command import Command, output_file
from quintet.data.files import FileRow, from_jsonl
from quintet.errors import UserError, writing


def run(arguments: argparse.Namespace) -> int:
    """Write responses to the prompts to --output or stdout, a JSON object a line. 0 done; failures: see the package."""
    from quintet.recipe.loader import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides, command="generate")
    prompts = _prompts(arguments, recipe.data.prompt_key)
    output = output_file("--output", arguments.output)
    from quintet.train.generate import generate

    samples = generate(recipe, prompts)
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    if output is not None:
        with writing(output):
            output.write_text(lines, encoding="utf-8")
        print(f"{len(samples)} samples of {len(prompts)} prompts written to {output}")
    elif sys.stdout.isatty():
        print("\n\n".join(_readable(sample) for sample in samples))
    else:
        print(lines, end="")
    return 0


def _prompts(arguments: argparse.Namespace, prompt_key: str) -> list[str]:
    prompts = list(arguments.prompt)
    if arguments.prompts:
        prompts += _read(arguments.prompts, prompt_key)
    if not prompts:
        raise UserError("no prompts: give --prompt TEXT (as often as you like) or --prompts FILE")
    return prompts


def _read(name: str, prompt_key: str) -> list[str]:
    """Prompts of a text file (one a line) or a jsonl file (column `data.prompt_key`); "-" is standard input."""
    try:
        if name.endswith(".jsonl"):
            prompts = [_of_row(row, prompt_key) for row in from_jsonl(Path(name))]
        else:
            text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
            prompts = [line for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    except OSError as error:
        raise UserError(f"--prompts {name}: {error.strerror} (looked in {Path.cwd()})") from None
    except UnicodeDecodeError:
        raise UserError(f"--prompts {name}: not UTF-8 text") from None
    if not prompts:
        raise UserError(f"--prompts {name}: no prompts in it; expected one a line")
    return prompts


def _of_row(row: FileRow, prompt_key: str) -> str:
    if not isinstance(prompt := row.columns.get(prompt_key), str):
        raise UserError(f"{row.source}: expected an object with a text {prompt_key!r} (data.prompt_key)")
    return prompt


def _readable(sample: dict[str, Any]) -> str:
    return f"\033[2m{sample.get('prompt', '')}\033[0m\n{sample.get('response', '')}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", metavar="TEXT", action="append", default=[], help="a prompt; may be repeated"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts from a text file, one a line, or a .jsonl file with the column data.prompt_key; - is standard input",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the samples there, one JSON object a line, instead of printing them",
    )


COMMAND = Command(
    name="generate",
    summary="generate responses to given prompts",
    description="""\
Generate responses with the recipe's model and `rollout` section. A prompt is rendered by the chat template
unless data.chat is false. On a terminal the samples are printed to be read, otherwise as JSON, one object a line.
Where one rank is enough it is this process, and nothing else is started. Progress goes to standard error, and no run directory is left behind.""",
    examples="""\
  quintet generate my.yaml --prompt "What is 12 + 30?" rollout.samples_per_prompt=1 rollout.temperature=0
  quintet generate runs/demo-20261121-100000/checkpoint --prompts questions.txt data.chat=false
  quintet generate my.yaml --prompts questions.jsonl --output samples.jsonl""",
    run=run,
    add_options=_add_options,
)
