"""The work that both sides of the laptop benchmark do, prompt by prompt and token by token.

Response lengths are fixed beforehand, for two reasons: both sides then decode and train exactly the same number of tokens, and
the model may have random weights (what a token costs does not depend on what it says). Each side forces a sample to end at its
length and not before. This file needs only the standard library, since TRL reads the work in an environment of its own.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

ALPHABET = "0123456789+-*/=()<>?.,:; abc"  # with pad, end and unknown: 31 tokens
PROMPTS_PER_STEP = 64
SAMPLES_PER_PROMPT = 8
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
"""A Qwen3-shaped model of 0.8M parameters, as Hugging Face names its sizes."""


@dataclass(frozen=True)
class Case:
    """One shape of work. Lengths count response tokens with the end-of-sequence token that closes them."""

    name: str
    shortest: int
    longest: int
    log_normal: bool
    """Else uniform. The log-normal has its middle 95% (two standard deviations) in the range; what falls outside is redrawn."""
    warmup_steps: int
    steps: int
    samples_per_prompt: int = SAMPLES_PER_PROMPT

    def prompts(self) -> list[str]:
        """Additions of one to three digits: PROMPTS_PER_STEP for each step, warm-up steps first."""
        rng = random.Random(f"{self.name} prompts")
        count = PROMPTS_PER_STEP * (self.warmup_steps + self.steps)
        return [
            f"{rng.randrange(10 ** rng.randint(1, 3))}+{rng.randrange(10 ** rng.randint(1, 3))}="
            for _ in range(count)
        ]

    def lengths(self) -> list[list[int]]:
        """Response tokens [step][sample], the samples of one prompt beside each other."""
        rng = random.Random(f"{self.name} lengths")
        count = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
        return [[self._length(rng) for _ in range(count)] for _ in range(self.warmup_steps + self.steps)]

    def _length(self, rng: random.Random) -> int:
        if not self.log_normal:
            return rng.randint(self.shortest, self.longest)
        low, high = math.log(self.shortest), math.log(self.longest)
        while True:
            length = round(rng.lognormvariate((low + high) / 2, (high - low) / 4))
            if self.shortest <= length <= self.longest:
                return length

    def work(self) -> dict[str, object]:
        """The case as plain data, for another process."""
        return {
            "case": self.name,
            "samples_per_prompt": self.samples_per_prompt,
            "longest": self.longest,
            "warmup_steps": self.warmup_steps,
            "steps": self.steps,
            "prompts": self.prompts(),
            "lengths": self.lengths(),
        }


CASES = {
    case.name: case
    for case in (
        Case("short", shortest=4, longest=5, log_normal=False, warmup_steps=5, steps=40),
        Case("long_tail", shortest=8, longest=256, log_normal=True, warmup_steps=1, steps=4),
    )
}


def reward(prompt: str, response: str, answer: str = "") -> float:
    """Share of digits in a response: cheap, never constant, and the same on both sides. Its worth is no matter here."""
    return sum(map(str.isdigit, response)) / max(1, len(response))
