"""Options that a recipe hands through to a back end."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from quintet.errors import UserError
from quintet.recipe.decided import decided_options


def passed_through(
    key: str, options: Mapping[str, Any], decided: Mapping[str, str], known: frozenset[str], fields: str
) -> dict[str, Any]:
    """The options, once it is sure that the back end knows them and that quintet leaves them free.

    key: where they stand in the recipe. decided: what quintet decides, and by what. known: the names that the back end
    knows; `fields` says whose they are. Raises UserError naming the option.
    """
    for _, sentence in decided_options(key, options, decided):
        raise UserError(sentence)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known - set(decided), 1)
            raise UserError(
                f"{key}.{name}: {fields} have no such field{f'; did you mean {near[0]}?' if near else '; remove it'}"
            )
    return dict(options)
