"""Generated samples as the controller knows them: all but their tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quintet.controller.messages import SampleInfo
from quintet.data.prompts import Prompt
from quintet.rewards.pool import Scoring
from quintet.rewards.result import RewardResult


class Kept(NamedTuple):
    """Where a sample's tokens are: the rollout, the call of `generate` that made it there, and its position in that."""

    rollout: int
    call: str
    at: int


@dataclass
class Samples:
    """Generated samples, in order of prompts and then of samples; `place` says which rollout keeps each, and where.

    groups: of each sample its prompt's position in `prompts`. versions: of each sample the policy that made it, counted in
    optimizer steps' publications. leases: what keeps their tokens alive. scorings: of each group that was finished, and not given
    up, its rewards on their way.
    """

    prompts: list[Prompt]
    groups: list[int]
    generated: list[SampleInfo]
    place: list[Kept]
    rewards: list[RewardResult]
    versions: list[int] = field(default_factory=list)
    leases: tuple[Any, ...] = field(default=(), repr=False)
    scorings: list[Scoring] = field(default_factory=list, repr=False)

    def mean(self) -> float:
        """Return the mean reward."""
        return sum(one.reward for one in self.rewards) / max(len(self.rewards), 1)

    def any_correct(self) -> float:
        """Return the share of prompts with at least one correct sample: pass@k."""
        right = {g for g, one in zip(self.groups, self.rewards, strict=True) if one.correct}
        return len(right) / len(self.prompts)

    def groups_with_signal(self) -> list[int]:
        """Return groups whose samples did not all get the same reward: the others teach nothing. What could not be scored says
        nothing."""
        seen: dict[int, set[float]] = {}
        for group, scored in zip(self.groups, self.rewards, strict=True):
            if scored.failure is None:
                seen.setdefault(group, set()).add(scored.reward)
        return [group for group, rewards in seen.items() if len(rewards) > 1]

    def equal_groups(self) -> float:
        """Return the share of groups whose samples are all worth the same, penalties and failures included: of no advantage."""
        worths: dict[int, set[float]] = {}
        for group, scored in zip(self.groups, self.rewards, strict=True):
            worths.setdefault(group, set()).add(scored.worth)
        return sum(len(found) == 1 for found in worths.values()) / len(worths)

    def select(self, groups: Sequence[int]) -> Samples:
        """Return these groups alone, in this order."""
        of_group: dict[int, list[int]] = {}
        for i, group in enumerate(self.groups):
            of_group.setdefault(group, []).append(i)
        chosen = [(new, i) for new, group in enumerate(groups) for i in of_group[group]]
        return Samples(
            [self.prompts[group] for group in groups],
            [new for new, _ in chosen],
            [self.generated[i] for _, i in chosen],
            [self.place[i] for _, i in chosen],
            [self.rewards[i] for _, i in chosen] if self.rewards else [],
            [self.versions[i] for _, i in chosen],
            self.leases,
        )

    def __add__(self, other: Samples) -> Samples:
        """Both, one after the other."""
        return Samples(
            self.prompts + other.prompts,
            self.groups + [len(self.prompts) + group for group in other.groups],
            self.generated + other.generated,
            self.place + other.place,
            self.rewards + other.rewards,
            self.versions + other.versions,
            self.leases + other.leases,
        )

    def aborted(self) -> list[int]:
        """Return the samples that were given up while they were generated."""
        return [i for i, made in enumerate(self.generated) if made.finish == "abort"]

    def unscored(self, reward: str) -> Iterator[str]:
        """Say how many responses `reward`, the function of that name, could not score in time, and which is the first; and how many not
        at all, and why not the first."""
        if late := [i for i, scored in enumerate(self.rewards) if scored.timed_out]:
            yield self._named(late, reward, "took too long to score and got 0")
        if lost := [i for i, scored in enumerate(self.rewards) if scored.failure is not None]:
            why = str(self.rewards[lost[0]].failure).partition("\n")[0]
            yield f"{self._named(lost, reward, 'could not be scored and got 0')}: {why}"

    def _named(self, which: list[int], reward: str, what: str) -> str:
        prompt, response = self.prompts[self.groups[which[0]]], self.generated[which[0]].text
        return (
            f"reward {reward}: {len(which)} of {len(self.rewards)} responses {what}; the first is "
            f"sample {which[0]}, {response[-80:]!r}, to {prompt.source}"
        )

    def spread(self, count: int | None = None) -> list[int]:
        """Return `count` samples, or all: the first of each prompt, then the second of each, in order of prompts within these."""
        seen: Counter[int] = Counter()
        rounds: list[tuple[int, int, int]] = []
        for i, group in enumerate(self.groups):
            rounds.append((seen[group], group, i))
            seen[group] += 1
        return [i for _, _, i in sorted(rounds)[:count]]

    def shown(self, count: int | None = None, kind: str = "train") -> list[dict[str, Any]]:
        """Return `count` samples, or all, spread over prompts, as they are written to samples.jsonl. kind: what they were made for,
        "train", or an evaluation's "eval" (sampled) and "greedy"."""
        return [
            {
                "kind": kind,
                "prompt": self.prompts[g].text,
                "response": made.text,
                "answer": self.prompts[g].answer,
                "reward": scored.reward,
                "correct": scored.correct,
                "finish": made.finish,
                "metrics": scored.metrics,
            }
            for i in self.spread(count)
            for g, made, scored in [(self.groups[i], self.generated[i], self.rewards[i])]
        ]
