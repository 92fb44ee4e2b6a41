"""`quintet sft`: supervised fine-tuning by a recipe."""

from __future__ import annotations

import argparse

from quintet.cli.command import Command


def run(arguments: argparse.Namespace) -> int:
    """Fine-tune, and write a run directory. 0 done, or nothing left to do; failures: see the package."""
    from quintet.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides, command="sft")
    from quintet.runs.resume import nothing_left

    if (run := nothing_left(recipe, "sft")) is not None:
        print(
            f"nothing left to do: {run} has finished. More steps go on with it; resume=null begins a new run"
        )
        return 0
    from quintet.train.sft import sft

    sft(recipe)
    return 0


COMMAND = Command(
    name="sft",
    summary="fine-tune a model on given responses",
    description="""\
Fine-tune a model on given responses (supervised): the recipe's `sft` section says how long and how fast, its
`data` section which column holds the response. The run directory is that of `quintet train`.""",
    examples="""\
  quintet sft my.yaml data.train_path=conversations.jsonl data.response_key=answer
  quintet sft my.yaml sft.steps=1000 sft.samples_per_step=128 sft.optimizer.lr=2e-5
  quintet sft my.yaml sft={}   # every default of the sft section""",
    run=run,
)
