"""`quintet train`: reinforcement learning by a recipe."""

from __future__ import annotations

import argparse

from quintet.cli.command import Command


def run(arguments: argparse.Namespace) -> int:
    """Train, and write a run directory. 0 done, or nothing left to do; failures: see the package."""
    from quintet.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides, command="train")
    from quintet.runs.resume import nothing_left

    if (run := nothing_left(recipe, "train")) is not None:
        print(
            f"nothing left to do: {run} has finished. More steps go on with it; resume=null begins a new run"
        )
        return 0
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
