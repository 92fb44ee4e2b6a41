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
    scratchpad: int = 0
    """1 works before it answers: each column's sum with its carry in two digits, lowest column first, then ">" and the
    sum with leading zeros to digits + 1. "964+494=" is answered by "081514>1458". Needs min_digits = digits."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_digits <= self.digits <= 18:
            raise ValueError("1 <= min_digits <= digits <= 18 must hold")
        if not 2 <= self.terms <= 8:
            raise ValueError("terms must be 2 to 8")
        if self.reverse not in (0, 1) or self.scratchpad not in (0, 1):
            raise ValueError("reverse and scratchpad must be 0 or 1")
        if self.scratchpad and (self.reverse or self.min_digits != self.digits):
            raise ValueError("scratchpad needs min_digits = digits and reverse = 0")

    @property
    def alphabet(self) -> str:
        return "0123456789+=>" if self.scratchpad else "0123456789+="

    def sample(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(self._operand(rng) for _ in range(self.terms))

    def canonical(self, problem: tuple[int, ...]) -> str:
        return "+".join(map(str, sorted(problem)))

    def prompt(self, problem: tuple[int, ...]) -> str:
        return "+".join(map(str, problem)) + "="

    def response(self, problem: tuple[int, ...]) -> str:
        return self._columns(problem) + self.answer(problem) if self.scratchpad else self.answer(problem)

    def answer(self, problem: tuple[int, ...]) -> str:
        """Return the sum as it stands in a response; ">" in front says that a scratchpad has to come before it."""
        if self.scratchpad:
            return f">{sum(problem):0{self.digits + 1}}"
        text = str(sum(problem))
        return text[::-1] if self.reverse else text

    @staticmethod
    def verify(prompt: str, response: str, answer: str) -> dict[str, float]:
        """Return reward and form as `Task.verify`; well-formed is a bare row of digits, or a scratchpad and an answer of the
        right lengths.

        What the scratchpad says is not scored.
        """
        text = response.strip()
        if answer.startswith(">"):
            width = len(answer) - 1
            form, right = rf"[0-9]{{{2 * (width - 1)}}}>[0-9]{{{width}}}", text.endswith(answer)
        else:
            form, right = "[0-9]+", text == answer
        well_formed = re.fullmatch(form, text) is not None
        right = well_formed and right
        return {"reward": float(right), "correct": right, "well_formed": float(well_formed)}

    def _columns(self, problem: tuple[int, ...]) -> str:
        carry, written = 0, ""
        for column in range(self.digits):
            total = sum(n // 10**column % 10 for n in problem) + carry
            written += f"{total:02}"
            carry = total // 10
        return written

    def _operand(self, rng: random.Random) -> int:
        digits = rng.randint(self.min_digits, self.digits)
        return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
