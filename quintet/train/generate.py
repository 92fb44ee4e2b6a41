"""Generation and evaluation without training."""

from __future__ import annotations

from typing import Any

from quintet.recipe.schema import Recipe
from quintet.train.evaluate import evaluate as evaluate_session
from quintet.train.session import session


def generate(recipe: Recipe, prompts: list[str]) -> list[dict[str, Any]]:
    """Return responses to texts: one dict a sample with prompt, response, response_tokens, finish and log-probs (sums)."""
    with session(recipe, "generate", texts=prompts) as s:
        with s.controller.generating():
            samples = s.controller.generate(
                s.inputs.prompts,
                s.sampling(),
                recipe.rollout.samples_per_prompt,
                f"{recipe.run.seed}/generate",
            )
        return [
            {
                "prompt": prompts[group],
                "response": made.text,
                "response_tokens": made.response_tokens,
                "finish": made.finish,
                "logprob": made.logprob,
                "raw_logprob": made.raw_logprob,
            }
            for group, made in zip(samples.groups, samples.generated, strict=True)
        ]


def evaluate(recipe: Recipe) -> dict[str, float]:
    """Return the accuracy on the recipe's held-out prompts."""
    with session(recipe, "eval") as s:
        return evaluate_session(s, 0)
