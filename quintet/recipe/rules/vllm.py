"""Rules of the vLLM rollout."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.decided import declared_fields, unknown_options
from quintet.recipe.rules.facts import Facts, Problem, rule
from quintet.recipe.vllm import CPU_EXPERTS, DECIDED, refusals


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


@rule
def vllm_knows_its_options(facts: Facts) -> Iterator[Problem]:
    """Options that are handed through are those of the vLLM that is installed here, where ranks run here."""
    options, here = facts.recipe.rollout.vllm, facts.recipe.cluster.address is None
    if facts.recipe.rollout.backend != "vllm" or not options or not here:
        return
    known = declared_fields("vllm", "engine/arg_utils.py", "EngineArgs")
    if known is not None:
        fields = "the EngineArgs of the vLLM that is installed here"
        for keys, text in unknown_options("rollout.vllm", options, DECIDED, known, fields):
            yield Problem(keys, text)
