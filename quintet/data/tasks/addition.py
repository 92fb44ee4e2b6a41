"""Addition of whole numbers: "57+8=" answered by "65"."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Addition:
    """Operands of `min_digits` to `digits` digits, each number of digits equally likely."""

    digits: int = 3
    min_digits: int = 1
    terms: int = 2
    """Numbers added."""
    reverse: int = 0
    """1 writes the sum with its lowest digit first, which a small model learns far sooner."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_digits <= self.digits <= 18:
            raise ValueError("1 <= min_digits <= digits <= 18 must hold")
        if not 2 <= self.terms <= 8:
            raise ValueError("terms must be 2 to 8")
        if self.reverse not in (0, 1):
            raise ValueError("reverse must be 0 or 1")

    @property
    def alphabet(self) -> str:
        return "0123456789+="

    def sample(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(self._operand(rng) for _ in range(self.terms))

    def canonical(self, problem: tuple[int, ...]) -> str:
        return "+".join(map(str, sorted(problem)))

    def prompt(self, problem: tuple[int, ...]) -> str:
        return "+".join(map(str, problem)) + "="

    def response(self, problem: tuple[int, ...]) -> str:
        return self.answer(problem)

    def answer(self, problem: tuple[int, ...]) -> str:
        text = str(sum(problem))
        return text[::-1] if self.reverse else text

    @staticmethod
    def verify(prompt: str, response: str, answer: str) -> dict[str, float]:
        """Well-formed is a bare row of digits."""
        text = response.strip()
        return {
            "reward": float(text == answer),
            "well_formed": float(re.fullmatch("[0-9]+", text) is not None),
        }

    def _operand(self, rng: random.Random) -> int:
        digits = rng.randint(self.min_digits, self.digits)
        return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
