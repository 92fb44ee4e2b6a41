"""Whether drafts go on being accepted: a drafter that has lost its weights, or part of its state, changes nothing else that shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METRIC, DRAFTED = "rollout/accepted_fraction", "rollout/draft_tokens"
ENOUGH = 200
"""Drafted tokens of a step from which on its share says something."""


class AcceptanceFalls:
    """The share of drafted tokens that is accepted, from one step to the next."""

    def __init__(self) -> None:
        self._before: float | None = None

    def __call__(self, line: Mapping[str, Any]) -> str | None:
        """Note a step's share; return the warning where it is half of the step's before or less. Between the two was a weight sync."""
        if line.get(DRAFTED, 0) < ENOUGH:
            return None
        before, self._before = self._before, line[METRIC]
        if not before or line[METRIC] > before / 2:
            return None
        return (
            f"warning: {line[METRIC]:.1%} of drafted tokens are accepted, {before:.1%} in the step before. What is generated is right all "
            "the same, and slower: after the weight sync in between, the layers that draft do not fit the policy"
        )
