"""Typed configuration: schema, loading, overrides, rules across fields.

`load_recipe` and `dump_resolved` are the way in and out; importing this package costs no torch.
"""

from quintet.recipe.loader import dump_resolved, load_recipe
from quintet.recipe.schema import Recipe

__all__ = ["Recipe", "dump_resolved", "load_recipe"]
