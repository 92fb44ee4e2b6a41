"""`quintet eval`: reward and accuracy of a model on held-out prompts."""

from __future__ import annotations

import argparse
import json

from quintet.cli.command import Command, output_file
from quintet.errors import writing


def run(arguments: argparse.Namespace) -> int:
    """Print what the model scores on held-out prompts, and write it to --output as JSON. 0 done; failures: see the package."""
    from quintet.recipe.loader import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides, command="eval")
    output, samples = (output_file(f"--{one}", getattr(arguments, one)) for one in ("output", "samples"))
    from quintet.train.generate import evaluate

    results = evaluate(recipe, samples)
    width = max(map(len, results), default=0)
    for name, value in results.items():
        print(f"{name:<{width}}  {value:.4f}" if isinstance(value, float) else f"{name:<{width}}  {value}")
    if output is not None:
        with writing(output):
            output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="FILE", help="also write the results there as JSON")
    parser.add_argument(
        "--samples",
        metavar="FILE",
        help="write all that was generated there, with its rewards, one JSON object a line",
    )


COMMAND = Command(
    name="eval",
    summary="measure a model on held-out prompts",
    description="""\
Evaluate the recipe's model on its held-out prompts: data.eval_path (or the built-in task's), train.eval_prompts
of them, train.eval_samples_per_prompt responses each at the rollout's temperature, and one greedy response each.
--samples writes them all with their rewards. Where one rank is enough it is this process, and nothing else is started.
Progress goes to standard error, and no run directory is left behind.""",
    examples="""\
  quintet eval my.yaml model.path=runs/demo-20261121-100000/checkpoint
  quintet eval my.yaml data.eval_path=gsm8k_test.jsonl train.eval_prompts=64 --output result.json --samples samples.jsonl""",
    run=run,
    add_options=_add_options,
)
