"""Rules of the vLLM rollout."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.rules.facts import Facts, Problem, rule
from quintet.recipe.vllm import refusals


@rule
def vllm_can_do_it(facts: Facts) -> Iterator[Problem]:
    """vLLM is asked only for what it can do, and for nothing that quintet decides itself."""
    if facts.recipe.rollout.backend == "vllm":
        yield from (Problem(keys, text) for keys, text in refusals(facts.recipe.rollout))
