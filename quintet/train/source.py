"""Where a step's samples come from: prompts in order, responses to them, and what these are worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from quintet.controller.samples import Samples
from quintet.data.stream import PromptStream
from quintet.rewards.overlong import overlong_penalty
from quintet.train.steps import Step

if TYPE_CHECKING:
    from quintet.train.session import Session


class Source:
    """The source of one run's samples. The order of prompts, and with it all else, follows from the seed and the steps taken."""

    def __init__(self, s: Session, stream: PromptStream) -> None:
        self._s, self.stream = s, stream
        self._step: Step | None = None
        self._taken = 0

    @contextmanager
    def awake(self, step: Step) -> Iterator[None]:
        """Keep rollouts awake for what a step takes: see `Controller.generating`."""
        self._step, self._taken = step, 0
        with self._s.observer.phase("generate"), self._s.controller.generating():
            yield

    def take(self) -> Samples:
        """Return the step's prompts and responses to them."""
        return self.more(self._s.recipe.train.prompts_per_step)

    def more(self, prompts: int) -> Samples:
        """Return samples of this many prompts more for the step."""
        s, step = self._s, self._step
        assert step is not None
        seed = f"{s.recipe.run.seed}/train/{step.number}" + (f"/{self._taken}" if self._taken else "")
        self._taken += 1
        chosen = self.stream.take(prompts)
        count, expected = s.recipe.rollout.samples_per_prompt, s.lengths.expected("train", chosen)
        samples = s.controller.generate(chosen, s.sampling(), count, seed, expected=expected)
        s.lengths.heard("train", chosen, [one.response_tokens for one in samples.generated])
        return samples

    def rewarded(self, samples: Samples) -> Samples:
        """Wait for the rewards of samples that have none yet. Where nothing is selected by them, that is once rollouts sleep: they are
        computed while training state comes back."""
        s, step = self._s, self._step
        assert step is not None
        if samples.rewards:
            return samples
        with s.observer.phase("reward"):
            s.controller.reward(samples)
            self._shape(samples)
        step.rewards += samples.rewards
        for zeros in samples.unscored(s.recipe.reward.function):
            s.observer.note(f"step {step.number}: {zeros}")
        return samples

    def tell(self, metric: str, value: float) -> None:
        """Set a metric of the step."""
        assert self._step is not None
        self._step.metrics[metric] = value

    def _shape(self, samples: Samples) -> None:
        """Take off what the recipe takes off long responses."""
        reward, longest = self._s.recipe.reward, self._s.recipe.rollout.max_response_tokens
        if reward.overlong_tokens is None:
            return
        for i, (made, scored) in enumerate(zip(samples.generated, samples.rewards, strict=True)):
            lost = overlong_penalty(made.response_tokens, longest, reward.overlong_tokens)
            off = lost * reward.overlong_penalty
            metrics = {**scored.metrics, "overlong_penalty": off}
            samples.rewards[i] = replace(scored, penalty=off, metrics=metrics)
