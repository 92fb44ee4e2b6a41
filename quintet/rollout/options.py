"""Options that a recipe hands through to a back end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quintet.errors import UserError
from quintet.recipe.reserved_options import DECLARED_IN, decided_options, declared_fields, unknown_options


def check_options(backend: str, options: Iterable[str], decided: Mapping[str, str], fields: str) -> None:
    """Raise UserError naming an option in rollout.`backend` that quintet decides, or that the back end, as it is installed here, does
    not know: the recipe was checked where ranks may not run.

    decided: what quintet decides, and by what. fields: whose the options are that it knows.
    """
    key, known = f"rollout.{backend}", declared_fields(backend, *DECLARED_IN[backend]) if options else None
    unknown = () if known is None else unknown_options(key, options, decided, known, fields)
    for problem in (*decided_options(key, options, decided), *unknown):
        raise UserError(problem.message)
