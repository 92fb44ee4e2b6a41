"""How many examples a property is tried on."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Return so many, or the share of them that the present profile has of hypothesis's own hundred (`make quick`)."""
    return count * settings.default.max_examples // 100
