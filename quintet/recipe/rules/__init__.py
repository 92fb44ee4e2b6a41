"""Rules across fields: each a small function whose docstring is the rule, in one sentence.

A rule yields a `Problem` for each way the recipe breaks it. Rules see the recipe as typed and, where the
model is known, its sizes; they read files' names, config.json, the headers of weights and nothing else, and start nothing. One file
a group; a new feature adds its rules to the group they belong to.
"""

from __future__ import annotations

from quintet.errors import UserError
from quintet.models.family import read_shape
from quintet.recipe.rules import batches, data, features, layout, model, run  # noqa: F401  (their rules join RULES, in this order)
from quintet.recipe.rules.facts import RULES, Command, Facts, Problem, Sizes
from quintet.recipe.schema import Recipe

__all__ = ["RULES", "Command", "Facts", "Problem", "Sizes", "broken_rules"]


def broken_rules(recipe: Recipe, command: Command = "train") -> list[Problem]:
    """Every problem of a recipe that has passed the type checks, in the order of `RULES`."""
    problems: list[Problem] = []
    sizes = shape = None
    if recipe.model.build is not None:
        build = recipe.model.build
        sizes = Sizes(
            build.layers, build.heads, build.kv_heads, build.ffn_hidden_size, build.max_position_embeddings
        )
    elif recipe.model.path is not None:
        try:
            shape = read_shape(recipe.model.path)
            sizes = Sizes(
                shape.layers, shape.heads, shape.kv_heads, shape.ffn_hidden_size, shape.max_positions
            )
        except UserError as error:
            problems.append(
                Problem(("model.path",), f"model.path: {str(error).removeprefix('model.path: ')}")
            )
    facts = Facts(recipe, command, sizes, shape)
    return problems + [problem for one in RULES for problem in one(facts)]
