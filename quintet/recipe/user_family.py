"""A model family of the user's own, named in the recipe as `model.family`."""

from __future__ import annotations

from inspect import isclass

from quintet.errors import UserError
from quintet.models import Family, register
from quintet.recipe.user_code import load_named


def use_family(spec: str | None) -> type[Family] | None:
    """Make the family that `model.family` names known in this process; nothing for None.

    Every process that reads a model calls this first: controller and ranks.

    Raises:
        UserError: there is no such file, module or class, it is no `Family`, it leaves out what a family has, or its name
            or an architecture is another family's.
    """
    if spec is None:
        return None
    if ":" not in spec:
        raise UserError(
            f"model.family: {spec!r} is not module:Class or file.py:Class; built-in families need not be named, config.json "
            "says which one a model is of"
        )
    found, _ = load_named("model.family", spec, "class", isclass)
    if not issubclass(found, Family) or found is Family:
        raise UserError(
            f"model.family: {spec} is not a subclass of quintet.models.Family, with name, architectures and shape(config)"
        )
    try:
        return register(found)
    except UserError as error:
        raise UserError(f"model.family: {error}") from None
