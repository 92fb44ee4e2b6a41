"""Groups of one call of `generate` as they finish: each is scored from then on, while others are generated."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.controller.messages import SampleInfo
from quintet.data.prompts import Prompt
from quintet.rewards.pool import RewardPool, Scoring, Unscored


class FinishedGroups:
    """By their prompts' positions, in whatever order they finish. pool: what scores them, if anything does."""

    def __init__(self, prompts: Sequence[Prompt], pool: RewardPool | None) -> None:
        self._prompts, self._pool = prompts, pool
        self.groups: dict[int, list[SampleInfo]] = {}
        self.scorings: dict[int, Scoring] = {}

    def add(self, number: int, group: list[SampleInfo]) -> None:
        """Take a group. One that came before, from a rollout that died, is scored again only where its texts are others. What was
        given up is not scored."""
        texts = [one.text for one in group]
        before, self.groups[number] = self.groups.get(number, []), group
        if self._pool is None or (number in self.scorings and texts == [one.text for one in before]):
            return
        if number in self.scorings:
            self._pool.cancel(self.scorings.pop(number))
        if all(one.finish != "abort" for one in group):
            p = self._prompts[number]
            samples = [Unscored(p.text, text, p.answer, p.source, p.row) for text in texts]
            self.scorings[number] = self._pool.submit(samples, first=number * len(group))

    def check(self) -> None:
        """Raise what ends the run, of a reward that failed."""
        if self._pool is not None:
            self._pool.check(self.scorings.values())

    def in_order(self) -> list[tuple[list[SampleInfo], Scoring | None]]:
        """Return all groups and what scores them, in the order of prompts."""
        return [(self.groups[number], self.scorings.get(number)) for number in range(len(self._prompts))]
