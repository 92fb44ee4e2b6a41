"""What a rule may look at, and the list that rules join."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from quintet.errors import UserError
from quintet.models import ModelShape
from quintet.models.lora import LoraShape
from quintet.recipe.derived import data_parallel
from quintet.recipe.lora import lora_shape
from quintet.recipe.problem import Problem
from quintet.recipe.schema import BuildModel, Recipe

Command = Literal["train", "sft", "generate", "eval"]


def written(value: object) -> str:
    """Return a key's value as an override has it."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def multiples(count: int, of: int) -> str:
    """Return the multiples of a number that are nearest to a count, in words."""
    below = count // of * of
    return f"{below} or {below + of}" if below else str(of)


@dataclass(frozen=True)
class Facts:
    """What a rule may look at. `shape` is None where the model is missing or cannot be read."""

    recipe: Recipe
    command: Command
    shape: ModelShape | None = None

    @property
    def read(self) -> ModelShape | None:
        """Shape of the model at model.path; None for a built one, whose vocabulary follows from the data."""
        return self.shape if self.recipe.model.path is not None else None

    def said(self, key: str) -> str | None:
        """Return `key=value` where a key has another value than its default, which the resolved recipe writes out."""
        above, _, name = key.rpartition(".")
        section: Any = attrgetter(above)(self.recipe)
        given = getattr(section, name)
        if given == type(section).model_fields[name].default:
            return None
        return f"{key}={written(given)}"

    @property
    def dp(self) -> int:
        """Data-parallel size of the training layout; meaningful once `ranks_divide` holds."""
        return data_parallel(self.recipe)

    @property
    def lora(self) -> LoraShape | None:
        """The adapters; None where there are none, and where `adapters_fit` says what is wrong with them."""
        with suppress(UserError):
            return lora_shape(self.recipe, self.shape) if self.shape is not None else None
        return None

    def lacks(self, package: str) -> bool:
        """Return whether a package is not installed here, where this machine runs the ranks: another cluster's have what they have."""
        return self.recipe.cluster.address is None and importlib.util.find_spec(package) is None


Rule = Callable[[Facts], Iterator[Problem]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Have this function look at every recipe."""
    RULES.append(function)
    return function


def shape_of_built(build: BuildModel) -> ModelShape:
    """Return the shape of a model to be built, but for its vocabulary, for which 1 stands: it follows from the data."""
    mimo = build.family == "mimo"
    return ModelShape(
        family=build.family,
        layers=build.layers,
        hidden_size=build.hidden_size,
        ffn_hidden_size=build.ffn_hidden_size,
        heads=build.heads,
        kv_heads=build.kv_heads,
        head_dim=build.head_dim,
        vocab_size=1,
        max_positions=build.max_position_embeddings,
        tied_embeddings=build.tied_embeddings,
        norm_eps=1e-6,
        qk_norm=not mimo,
        qkv_bias=mimo,
        moe=build.moe,
    )
