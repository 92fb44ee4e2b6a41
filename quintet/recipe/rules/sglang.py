"""Rules of the SGLang rollout."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.rules.facts import Facts, Problem, rule
from quintet.recipe.sglang import refusals


@rule
def sglang_can_do_it(facts: Facts) -> Iterator[Problem]:
    """SGLang is asked only for what it can do, and for nothing that quintet decides itself."""
    if facts.recipe.rollout.backend != "sglang":
        return
    if facts.recipe.cluster.device == "cpu":
        yield Problem(
            ("rollout.backend", "cluster.device"),
            "rollout.backend=sglang needs NVIDIA GPUs, and cluster.device=cpu; use rollout.backend=native, or cluster.device=cuda",
        )
    yield from (Problem(keys, text) for keys, text in refusals(facts.recipe.rollout))
