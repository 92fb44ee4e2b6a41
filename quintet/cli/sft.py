"""`quintet sft`: supervised fine-tuning by a recipe."""

from __future__ import annotations

import argparse

from quintet.cli.command import Command, to_train


def run(arguments: argparse.Namespace) -> int:
    """Fine-tune, and write a run directory. 0 done, or nothing left to do; failures: see the package."""
    if (recipe := to_train(arguments, "sft")) is not None:
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
