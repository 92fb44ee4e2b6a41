"""Rules of the vLLM rollout."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.rules.facts import Facts, Problem, rule
from quintet.recipe.vllm import CPU_EXPERTS, refusals


@rule
def vllm_can_do_it(facts: Facts) -> Iterator[Problem]:
    """vLLM is asked only for what it can do, and for nothing that quintet decides itself."""
    recipe, layout = facts.recipe, facts.recipe.rollout.layout
    if recipe.rollout.backend != "vllm":
        return
    yield from (Problem(keys, text) for keys, text in refusals(recipe.rollout))
    if recipe.cluster.device == "cpu" and layout is not None and layout.ep > 1:
        yield Problem(
            ("rollout.layout.ep", "cluster.device"), f"rollout.layout.ep={layout.ep}: {CPU_EXPERTS}"
        )
