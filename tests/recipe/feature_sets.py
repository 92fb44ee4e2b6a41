"""What the tables of features say of a recipe, and of two features."""

from __future__ import annotations

from quintet.models import ModelShape
from quintet.recipe.features import FEATURES
from quintet.recipe.refused import REFUSED_PAIRS
from quintet.recipe.schema import Recipe


def features_on(recipe: Recipe, shape: ModelShape | None = None) -> set[str]:
    """Return the ids of what a recipe switches on. What depends on the model is off without its shape."""
    return {one.id for one in FEATURES.values() if one.is_on(recipe, shape)}


def refused_pair(first: str, second: str) -> str | None:
    """Return the sentence with which two features, by id, are refused together; None where they can be combined."""
    for pair in REFUSED_PAIRS:
        if {first, second} == {pair.first, pair.second}:
            return pair.sentence()
    a, b = FEATURES[first], FEATURES[second]
    if a is not b and a.choice and a.choice == b.choice:
        return f"{a.name} and {b.name} are two values of {a.choice}, which takes one"
    return None
