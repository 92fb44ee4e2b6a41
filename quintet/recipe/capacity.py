"""Does a sample fit a micro-batch? The packer's own arithmetic, for the checks that run before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from quintet.packing.align import alignment_of
from quintet.packing.dynamic import smallest_fits
from quintet.recipe.derived import layout_of
from quintet.recipe.schema import Layout, Recipe


def overflow(recipe: Recipe, tokens: int, roles: Iterable[str] = ()) -> tuple[str, str] | None:
    """Return None when a sample of `tokens` fits a micro-batch of the layout, padding included, and of those of these roles that have
    one of their own; else why not, and the smallest settings that it fits.

    The first continues "N tokens are …": "more than …" or "N with padding to a multiple of …, more than …".
    """
    layouts = {"layout": recipe.layout} | {f"{role}.layout": layout_of(recipe, role) for role in roles}
    budget = recipe.engine.tokens_per_microbatch_per_rank
    needed = {key: _needed(recipe, one, tokens) for key, one in layouts.items()}
    short = [key for key, (least, _) in needed.items() if least > budget]
    if not short:
        return None
    fits = f"engine.tokens_per_microbatch_per_rank={max(least for least, _ in needed.values())}"
    ranks = {key: (cp or 0) * layouts[key].tp * layouts[key].pp for key, (_, cp) in needed.items()}
    if all(ranks[key] and recipe.cluster.ranks % ranks[key] == 0 for key in short):
        fits += " or " + " and ".join(f"{key}.cp={needed[key][1]}" for key in short)
    return _why(recipe, short[0], layouts[short[0]], tokens), fits


def _needed(recipe: Recipe, layout: Layout, tokens: int) -> tuple[int, int | None]:
    budget = recipe.engine.tokens_per_microbatch_per_rank
    align = partial(alignment_of, layout, engine=recipe.engine)
    return smallest_fits(tokens, layout.cp, budget, align, dynamic=layout.dynamic_cp)


def _why(recipe: Recipe, key: str, layout: Layout, tokens: int) -> str:
    budget = recipe.engine.tokens_per_microbatch_per_rank
    aligned = alignment_of(layout, layout.cp, recipe.engine)
    room, taken = aligned.room(budget * layout.cp), aligned.row([tokens])
    padded = f"{taken} with padding to a multiple of {aligned.total}, " if taken != tokens else ""
    usable = f" ({room} in whole multiples of {aligned.total})" if room != budget * layout.cp else ""
    each = f" × {key}.cp={layout.cp}" if layout.cp > 1 or key != "layout" else ""
    return f"{padded}more than engine.tokens_per_microbatch_per_rank={budget}{each}{usable}"
