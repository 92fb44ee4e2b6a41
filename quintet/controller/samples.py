"""Generated samples as the controller knows them: all but their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quintet.controller.messages import SampleInfo
from quintet.data.prompts import Prompt
from quintet.rewards.load import RewardResult


@dataclass
class Samples:
    """Generated samples, in order of prompts and then of samples; `place` says which rollout keeps each, and where."""

    prompts: list[Prompt]
    groups: list[int]
    generated: list[SampleInfo]
    place: list[tuple[int, int]]
    rewards: list[RewardResult]

    def mean(self, name: str = "reward") -> float:
        """Mean reward, or mean of a number the reward function returned beside it (0 where it did not)."""
        values = [r.reward if name == "reward" else r.metrics.get(name, 0.0) for r in self.rewards]
        return sum(values) / max(len(values), 1)

    def timed_out(self, reward: str) -> str | None:
        """Say how many responses `reward`, the function of that name, could not score in time, and which is the first."""
        late = [i for i, scored in enumerate(self.rewards) if scored.timed_out]
        if not late:
            return None
        prompt, response = self.prompts[self.groups[late[0]]], self.generated[late[0]].text
        return (
            f"reward {reward}: {len(late)} of {len(self.rewards)} responses took too long to score and got 0; the first is "
            f"sample {late[0]}, {response[-80:]!r}, to {prompt.source}"
        )

    def shown(self, count: int) -> list[dict[str, Any]]:
        """The first `count` samples, as they are written to samples.jsonl."""
        return [
            {
                "prompt": self.prompts[g].text,
                "response": made.text,
                "answer": self.prompts[g].answer,
                "reward": scored.reward,
                "finish": made.finish,
                "metrics": scored.metrics,
            }
            for g, made, scored in list(zip(self.groups, self.generated, self.rewards, strict=True))[:count]
        ]
