"""Typed configuration: schema, loading, overrides, rules across fields.

`load_recipe` and `dump_resolved` are the way in and out; importing this package costs no torch. Nor does it cost the schema
until that is asked for: a process that scores rewards needs `user_code` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quintet.recipe.loader import dump_resolved, load_recipe
    from quintet.recipe.schema import Recipe

__all__ = ["Recipe", "dump_resolved", "load_recipe"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quintet.recipe import loader, schema

    return getattr(schema if name == "Recipe" else loader, name)
