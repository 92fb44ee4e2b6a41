"""`quintet train`: reinforcement learning by a recipe."""

from __future__ import annotations

import argparse

from quintet.cli.command import Command, to_train


def run(arguments: argparse.Namespace) -> int:
    """Train, and write a run directory. 0 done, or nothing left to do; failures: see the package."""
    if (recipe := to_train(arguments, "train")) is not None:
        from quintet.train.ppo import train

        train(recipe)
    return 0


COMMAND = Command(
    name="train",
    summary="train a model by reinforcement learning",
    description="""\
Train a model by reinforcement learning: each step generates responses to prompts, rewards them, and takes
optimizer steps on what the rewards say. With an `sft` section in the recipe, a supervised warm-up comes first.

Everything about the run lands in its run directory (run.dir/run.name-<time>): metrics.jsonl, summary.json,
samples.jsonl, the resolved recipe, report.html, and the trained model as a Hugging Face checkpoint. Summary and report are
there from the first step on. Ctrl-C and SIGTERM let the step finish and write what there is; a second one ends at once.
The recipe is checked completely before any process starts.""",
    examples="""\
  quintet train recipes/laptop_gsm8k.yaml data.train_path=gsm8k_train.jsonl data.eval_path=gsm8k_test.jsonl
  quintet train my.yaml train.steps=200 optimizer.lr=3e-6 run.trackers=[tensorboard]
  quintet train my.yaml cluster.ranks=4 layout.tp=2 rollout.layout.tp=1   # train on tp 2 × dp 2, generate on dp 4""",
    run=run,
)
