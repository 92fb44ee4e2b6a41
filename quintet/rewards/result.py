"""What a reward makes of a sample, and what samples came to together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(frozen=True)
class RewardResult:
    """What one sample is worth: a number to be learnt from, whether it is right where the reward says so, and further numbers."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers that the function returned, by name, such as `well_formed`."""
    correct: bool | None = None
    """Whether the response is right; None where the reward does not say."""
    timed_out: bool = False
    """Whether the reward is 0 because scoring took too long."""
    failure: str | None = None
    """Why the reward is 0 though the function gave none."""
    penalty: float = 0.0
    """What a long response loses of it (`reward.overlong_tokens`)."""

    @property
    def worth(self) -> float:
        """The reward that is learnt from: the reward less the penalty."""
        return self.reward - self.penalty


def means(results: Sequence[RewardResult]) -> dict[str, float]:
    """Return metrics of scored samples: the accuracy, and the mean of each further number.

    `accuracy` is there where the reward says what is correct. Other numbers are `reward/<name>`, but for `well_formed`; where the
    function did not return one it counts as 0.
    """
    told = {}
    if any(one.correct is not None for one in results):  # a sample of which it then does not say so is not
        told["accuracy"] = fmean(one.correct is True for one in results)
    for name in sorted({name for one in results for name in one.metrics}):
        key = name if name == "well_formed" else f"reward/{name}"
        told[key] = fmean(one.metrics.get(name, 0.0) for one in results)
    return told
