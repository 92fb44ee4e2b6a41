"""Options that a recipe hands through to a back end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quintet.errors import UserError
from quintet.recipe.reserved_options import decided_options, unknown_options


def passed_through(
    key: str, options: Mapping[str, Any], decided: Mapping[str, str], known: frozenset[str], fields: str
) -> dict[str, Any]:
    """Return the options, once it is sure that the back end knows them and that quintet leaves them free.

    key: where they stand in the recipe. decided: what quintet decides, and by what. known: the names that the back end
    knows; `fields` says whose they are. Raises UserError naming the option.
    """
    refused = (
        *decided_options(key, options, decided),
        *unknown_options(key, options, decided, known, fields),
    )
    for problem in refused:
        raise UserError(problem.message)
    return dict(options)
