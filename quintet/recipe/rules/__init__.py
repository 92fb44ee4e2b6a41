"""Rules across fields: each a small function whose docstring is the rule, in one sentence.

A rule yields a `Problem` for each way the recipe breaks it. Rules see the recipe as typed and, where the
model is known, its shape; they read files' names, config.json, the headers of weights and nothing else, and start nothing. One file
a group; a new feature adds its rules to the group they belong to.
"""

from __future__ import annotations

from quintet.errors import UserError
from quintet.models import ModelShape, held_shape, read_shape
from quintet.recipe.hub import are_shapes_alone
from quintet.recipe.mtp import with_mtp
from quintet.recipe.problem import Problem
from quintet.recipe.rules import (  # noqa: F401  (their rules join RULES, in this order)
    algorithm,
    batches,
    data,
    engine,
    experts,
    features,
    fp8,
    layout,
    lora,
    model,
    optimizer,
    rollout,
    run,
    sglang,
    unread,
    vllm,
)
from quintet.recipe.rules.facts import RULES, Command, Facts, shape_of_built
from quintet.recipe.schema import Recipe
from quintet.recipe.time_limit import TimeUp, stop_the_clock
from quintet.recipe.user_family import use_family

OF_FILES = frozenset(
    {
        *("weights_are_there", "data_is_named", "reward_is_there"),
        *("layers_are_installed", "eight_bits_are_installed"),
    }
)
"""Rules of files and of what is installed, which do not count while a model need be no more than a config.json."""

__all__ = ["OF_FILES", "RULES", "Command", "Facts", "Problem", "broken_rules", "shape_of"]


def shape_of(recipe: Recipe) -> ModelShape | None:
    """Return the shape of what the recipe loads of its model; None when it names none, or two. A built model's vocabulary is left
    open (1).

    Raises UserError for a directory that cannot be read, a model that is not supported or a family that is none, and for layers
    that `mtp` asks for in vain.
    """
    path, build = recipe.model.path, recipe.model.build
    use_family(recipe.model.family)
    if path is not None and build is None:
        directory = recipe.model.directory or path
        whole = recipe.mtp is None or are_shapes_alone()
        return with_mtp(recipe, read_shape(directory) if whole else held_shape(directory))
    return with_mtp(recipe, shape_of_built(build)) if path is None and build is not None else None


def broken_rules(
    recipe: Recipe, command: Command = "train", shape: ModelShape | None = None
) -> list[Problem]:
    """Return every problem of a recipe that has passed the type checks, in the order of `RULES`. shape: of the model, where it is known."""
    problems: list[Problem] = []
    try:
        shape = shape or shape_of(recipe)
    except UserError as error:
        keys = [key for key in ("model.family", "mtp.init_layers", "mtp") if str(error).startswith(key)]
        text = str(error) if keys else f"model.path: {str(error).removeprefix('model.path: ')}"
        problems.append(Problem(text, *keys[:1]))
    facts = Facts(recipe, command, shape)
    rules = [one for one in RULES if not (are_shapes_alone() and one.__name__ in OF_FILES)]
    for number, one in enumerate(rules):
        try:
            problems += one(facts)
        except TimeUp as limit:
            stop_the_clock()
            sentence = (one.__doc__ or "").strip().partition("\n")[0]
            said = f"{limit} did not suffice to look through {len(rules) - number} of its rules, from this on: {sentence}"
            problems.append(Problem(said))
            break
    return problems
