"""Does a sample fit a micro-batch? The packer's own arithmetic, for the checks that run before anything starts."""

from __future__ import annotations

from collections.abc import Iterable

from quintet.packing import alignment_of, cell_sizes
from quintet.recipe.roles import layout_of
from quintet.recipe.schema import Layout, Recipe


def overflow(recipe: Recipe, tokens: int, roles: Iterable[str] = ()) -> str | None:
    """Return None when a sample of `tokens` fits a micro-batch of the layout, padding included, and of those of these roles that have
    one of their own; else why not.

    The sentence continues "N tokens are …": "more than …" or "N with padding to a multiple of …, more than …".
    """
    own = {f"{role}.layout": layout_of(recipe, role) for role in roles}
    found = (
        _overflow(recipe, tokens, key, layout) for key, layout in ({"layout": recipe.layout} | own).items()
    )
    return next((why for why in found if why is not None), None)


def _overflow(recipe: Recipe, tokens: int, key: str, layout: Layout) -> str | None:
    budget = recipe.engine.tokens_per_microbatch_per_rank
    aligned = alignment_of(layout, layout.cp, recipe.engine.fp8)
    room, taken = aligned.room(budget * layout.cp), aligned.row([tokens])
    if taken <= room or (layout.dynamic_cp and _fits_smaller(recipe, layout, tokens)):
        return None
    padded = f"{taken} with padding to a multiple of {aligned.total}, " if taken != tokens else ""
    usable = f" ({room} in whole multiples of {aligned.total})" if room != budget * layout.cp else ""
    each = f" × {key}.cp={layout.cp}" if layout.cp > 1 or key != "layout" else ""
    return f"{padded}more than engine.tokens_per_microbatch_per_rank={budget}{each}{usable}"


def _fits_smaller(recipe: Recipe, layout: Layout, tokens: int) -> bool:
    """Whether a group of fewer than layout.cp ranks holds it, whose rows are padded to less."""
    budget, sizes = recipe.engine.tokens_per_microbatch_per_rank, cell_sizes(layout.cp)
    aligned = {n: alignment_of(layout, n, recipe.engine.fp8) for n in sizes}
    return any(aligned[n].row([tokens]) <= aligned[n].room(budget * n) for n in sizes)
