"""What a recipe can switch on, and what this version does not offer yet.

A feature is on or off by keys alone. A feature that is not available is refused by name, with what to use
instead; nothing is ever ignored. When two features cannot be combined, that pair belongs here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintet.recipe.schema import Recipe


@dataclass(frozen=True)
class Feature:
    """One thing a recipe can switch on: its name in messages, the key that does it, and how to tell."""

    name: str
    key: str
    is_on: Callable[[Recipe], bool]


@dataclass(frozen=True)
class NotAvailable:
    """A feature this version does not have, and what a user does instead."""

    feature: Feature
    instead: str


NOT_AVAILABLE = [
    NotAvailable(
        Feature("context parallelism", "layout.cp", lambda recipe: recipe.layout.cp > 1),
        "use layout.cp=1; for long samples raise layout.tp with layout.sp=true",
    ),
    NotAvailable(
        Feature("expert parallelism", "layout.ep", lambda recipe: recipe.layout.ep > 1),
        "use layout.ep=1; models with experts cannot be trained yet",
    ),
    NotAvailable(
        Feature("expert tensor parallelism", "layout.etp", lambda recipe: recipe.layout.etp is not None),
        "leave layout.etp=null; models with experts cannot be trained yet",
    ),
    NotAvailable(
        Feature("the interleaved pipeline", "layout.vpp", lambda recipe: recipe.layout.vpp > 1),
        "use layout.vpp=1",
    ),
    NotAvailable(
        Feature(
            "expert parallelism in the rollout",
            "rollout.layout.ep",
            lambda recipe: recipe.rollout.layout is not None and recipe.rollout.layout.ep > 1,
        ),
        "use rollout.layout.ep=1",
    ),
    NotAvailable(
        Feature("the vLLM rollout", "rollout.backend", lambda recipe: recipe.rollout.backend == "vllm"),
        "use rollout.backend=native",
    ),
    NotAvailable(
        Feature("the SGLang rollout", "rollout.backend", lambda recipe: recipe.rollout.backend == "sglang"),
        "use rollout.backend=native",
    ),
    NotAvailable(
        Feature("FP8 training", "engine.megatron.fp8", lambda recipe: "fp8" in recipe.engine.megatron),
        "remove it and use model.dtype=bf16",  # Without TransformerEngine, megatron-core would ignore it.
    ),
]
