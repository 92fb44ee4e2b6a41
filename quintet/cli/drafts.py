"""What `quintet check` says of drafts: how many tokens `rollout.draft_tokens=auto` takes, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quintet.recipe import Recipe


def describe_drafts(recipe: Recipe) -> Iterator[str]:
    """Describe what auto takes on a CPU, or on each GPU of the table."""
    from quintet.recipe.rules import shape_of
    from quintet.rollout.draft_length import drafts_of, read_table

    shape = shape_of(recipe)
    if recipe.rollout.draft_tokens != "auto" or shape is None:
        return
    devices, rest = ["cpu"], []
    if recipe.cluster.device != "cpu":
        devices, rest = sorted({row.device for row in read_table()} - {"cpu"}), ["none on other devices"]
    told = [drafts_of(recipe, shape.mtp_layers, device).why for device in devices]
    yield f"Drafts: {'; '.join([*told, *rest])}."
