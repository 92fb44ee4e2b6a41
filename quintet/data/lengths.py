"""How long responses to the prompts of a run were: what is known of those to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quintet.data.prompts import Prompt, Which


class ResponseLengths:
    """By side of the data and prompt, the mean of the last responses to it, in tokens."""

    def __init__(self) -> None:
        self._tokens: dict[str, dict[int, int]] = {}

    def heard(self, side: Which, prompts: Sequence[Prompt], tokens: Sequence[int]) -> None:
        """Note the lengths of responses, as many to each of these prompts, in their order."""
        count, known = len(tokens) // len(prompts), self._tokens.setdefault(side, {})
        for at, prompt in enumerate(prompts):
            known[prompt.id] = round(sum(tokens[at * count : (at + 1) * count]) / count)

    def expected(self, side: Which, prompts: Sequence[Prompt]) -> list[float] | None:
        """Return how long responses to each of these prompts will be: as the last ones were, where there are any, and as the mean of
        the others where not. None where nothing is known of any."""
        found = [self._tokens.get(side, {}).get(prompt.id) for prompt in prompts]
        known = [tokens for tokens in found if tokens is not None]
        if not known:
            return None
        mean = sum(known) / len(known)
        return [mean if tokens is None else tokens for tokens in found]

    def state_dict(self) -> dict[str, Any]:
        """Return what is known as plain values, for JSON."""
        return {side: [list(one) for one in known.items()] for side, known in self._tokens.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Know again what was known."""
        self._tokens = {side: dict(known) for side, known in state.items()}
