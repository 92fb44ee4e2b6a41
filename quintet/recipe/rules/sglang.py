"""Rules of the SGLang rollout."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.recipe.problem import Problem
from quintet.recipe.reserved_options import unknown_here
from quintet.recipe.rules.facts import Facts, rule
from quintet.recipe.sglang import DECIDED, refusals


@rule
def sglang_can_do_it(facts: Facts) -> Iterator[Problem]:
    """SGLang is asked only for what it can do, and for nothing that quintet decides itself."""
    if facts.recipe.rollout.backend != "sglang":
        return
    if facts.recipe.cluster.device == "cpu":
        yield Problem(
            "rollout.backend=sglang needs NVIDIA GPUs, and cluster.device=cpu; use rollout.backend=native, or cluster.device=cuda"
        )
    if facts.recipe.mtp is not None:
        yield Problem(
            "rollout.backend=sglang with mtp: whether SGLang takes the weights of layers for multi-token prediction has not been "
            "tried; use rollout.backend=vllm or native, or mtp=null",
            "rollout.backend",
            "mtp",
        )
    yield from refusals(facts.recipe.rollout)


@rule
def sglang_knows_its_options(facts: Facts) -> Iterator[Problem]:
    """Options that are handed through are those of the SGLang that is installed here, where ranks run here."""
    return unknown_here(facts.recipe, "sglang", "SGLang", DECIDED)
