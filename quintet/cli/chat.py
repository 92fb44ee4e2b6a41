"""`quintet chat`: a conversation with a model."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator

from quintet.cli.command import Command
from quintet.errors import UserError


def run(arguments: argparse.Namespace) -> int:
    """Answer lines of standard input until it ends. 0 done; failures: see the package."""
    from quintet.recipe.loader import load_recipe

    given = [f"model.path={json.dumps(arguments.checkpoint)}"]
    if arguments.system is not None:
        given.append(f"data.system_prompt={json.dumps(arguments.system)}")
    recipe = load_recipe(None, [*given, *arguments.overrides], command="generate")
    from quintet.train.generate import answering

    with answering(recipe) as answer:
        if sys.stdin.isatty():
            print("/reset forgets the conversation, Ctrl-D ends", file=sys.stderr)
        _talk(answer)
    return 0


def _talk(answer: Callable[[list[dict[str, str]], Callable[[str], None]], str]) -> None:
    conversation: list[dict[str, str]] = []
    out = sys.stdout  # what a rank in this process prints meanwhile goes to its log

    def show(piece: str) -> None:
        print(piece, end="", file=out, flush=True)

    for line in _lines():
        if line == "/reset":
            conversation = []
            print("(forgotten)", file=sys.stderr)
        elif re.fullmatch(r"/\w+", line):
            print(f"there is no {line}; /reset forgets the conversation, Ctrl-D ends", file=sys.stderr)
        elif line:
            asked = [*conversation, {"role": "user", "content": line}]
            try:
                said = answer(asked, show)
            except UserError as error:  # too long, or not to be tokenized: the next line may be better
                print(f"error: {error}\n/reset forgets the conversation", file=sys.stderr)
                continue
            show("\n")
            conversation = [*asked, {"role": "assistant", "content": said}]


def _lines() -> Iterator[str]:
    """What is typed, up to Ctrl-D."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (input() then knows arrows and history)

        prompt = "> "
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            return


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system prompt: data.system_prompt")


COMMAND = Command(
    name="chat",
    summary="talk with a model",
    description="""\
Talk with a model: each line of standard input is answered, by the model's chat template and with the conversation so far;
one rank in this process, as a small model has, shows its answer while it is written.
/reset forgets the conversation, Ctrl-D ends. Keys of a recipe set all else, such as the temperature.""",
    examples="""\
  quintet chat runs/demo-20261121-100000/checkpoint rollout.temperature=0
  quintet chat Qwen2.5-0.5B-Instruct --system "Answer in one sentence." rollout.max_response_tokens=200""",
    run=run,
    add_options=_add_options,
    usage="CHECKPOINT [key=value ...] [options]",
    takes=("CHECKPOINT", "a Hugging Face directory, such as RUN/checkpoint"),
)
