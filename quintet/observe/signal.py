"""Whether there was anything to learn: samples of one prompt that all got the same reward have advantages of 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

METRIC = "frac_groups_zero_std"
"""Share of a step's groups whose samples are all worth the same; none where advantages are not relative to a group."""
MOST_IDLE_STEPS = 5
"""Steps in a row without any signal after which it is told."""
TRY = (
    "Read some responses in samples.jsonl: is the reward right about them? If it is, give it parts of its points for parts of an answer "
    "(a dict with reward and correct), take easier prompts, begin with a warm-up (sft), or sample more and more varied responses "
    "(rollout.samples_per_prompt, rollout.temperature)."
)


class IdleSteps:
    """Steps in a row in which no group had a signal."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, line: Mapping[str, Any]) -> str | None:
        """Count a step; return the warning where there have just been too many."""
        self._count = self._count + 1 if line.get(METRIC) == 1 else 0
        if self._count != MOST_IDLE_STEPS:
            return None
        return f"warning: {MOST_IDLE_STEPS} steps in a row without signal: {_why([line])}. Nothing is learnt from such steps. {TRY}"


def nothing_learnt(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a run's steps taught nothing and what to try, if none of them had a signal."""
    if not steps or any(line.get(METRIC) != 1 for line in steps):
        return None
    return (
        f"Nothing was learnt from rewards: in every step {_why(steps)}, and so every advantage was 0. {TRY}"
    )


def _why(steps: Sequence[Mapping[str, Any]]) -> str:
    rewards = {line.get("reward/mean") for line in steps}
    if len(rewards) == 1 and not any(line.get("reward/std") for line in steps):
        return f"every response got the reward {rewards.pop():g}"
    return "all responses to one prompt got the same reward"
