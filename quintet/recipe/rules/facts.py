"""What a rule may look at, and the list that rules join."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quintet.models.family import ModelShape
from quintet.recipe.schema import Recipe

Command = Literal["train", "sft", "generate", "eval"]


class Problem(NamedTuple):
    """What is wrong, in the user's words, and the dotted keys that take part in it."""

    keys: tuple[str, ...]
    message: str


class Sizes(NamedTuple):
    """What layouts must divide."""

    layers: int
    heads: int
    kv_heads: int
    ffn_hidden_size: int
    max_positions: int


@dataclass(frozen=True)
class Facts:
    """What a rule may look at. `sizes` is None where the model is missing or cannot be read."""

    recipe: Recipe
    command: Command
    sizes: Sizes | None
    shape: ModelShape | None = None
    """Of the model at model.path; None for a built one, whose vocabulary follows from the data."""

    @property
    def dp(self) -> int:
        """Data-parallel size of the training layout; meaningful once `ranks_divide` holds."""
        layout = self.recipe.layout
        return max(1, self.recipe.cluster.ranks // (layout.tp * layout.pp * layout.cp))


Rule = Callable[[Facts], Iterator[Problem]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function
