"""Countdown: reach a target with the given numbers, each used at most once. "3,5,7:22=" answered by "3*5+7"."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
# Long enough for any solution, short enough that parsing and products stay small.
_LONGEST_EXPRESSION = 200


class Puzzle(NamedTuple):
    numbers: tuple[int, ...]
    target: int
    solution: str


@dataclass(frozen=True)
class Countdown:
    """`numbers` numbers from 1 to `max_number`, and a target from 1 to `max_target` that they can reach."""

    numbers: int = 3
    max_number: int = 9
    max_target: int = 99

    def __post_init__(self) -> None:
        if not 2 <= self.numbers <= 8:
            raise ValueError("numbers must be 2 to 8")
        if not 2 <= self.max_number <= 999:
            raise ValueError("max_number must be 2 to 999")
        if not self.max_number <= self.max_target <= 99999:
            raise ValueError("max_target must be between max_number and 99999")

    @property
    def alphabet(self) -> str:
        return "0123456789+-*(),:="

    def sample(self, rng: random.Random) -> Puzzle:
        while True:
            numbers = [rng.randint(1, self.max_number) for _ in range(self.numbers)]
            value, text, is_sum = numbers[0], str(numbers[0]), False
            for number in numbers[1:]:
                sign = rng.choice("+-*")
                if sign == "*":
                    text = f"({text})*{number}" if is_sum else f"{text}*{number}"
                    value, is_sum = value * number, False
                else:
                    text = f"{text}{sign}{number}"
                    value, is_sum = value + number if sign == "+" else value - number, True
            if 1 <= value <= self.max_target:
                return Puzzle(tuple(sorted(numbers)), value, text)

    def canonical(self, problem: Puzzle) -> str:
        return f"{','.join(map(str, problem.numbers))}:{problem.target}"

    def prompt(self, problem: Puzzle) -> str:
        return self.canonical(problem) + "="

    def response(self, problem: Puzzle) -> str:
        return problem.solution

    def answer(self, problem: Puzzle) -> str:
        """Return the numbers and the target: there are many solutions, so the verifier gets the puzzle."""
        return self.canonical(problem)

    @staticmethod
    def verify(prompt: str, response: str, answer: str) -> dict[str, float]:
        """Return reward and form as `Task.verify`; well-formed is an expression of whole numbers, + - * and parentheses."""
        evaluated = evaluate(response)
        if evaluated is None:
            return {"reward": 0.0, "correct": False, "well_formed": 0.0}
        value, used = evaluated
        numbers, _, target = answer.partition(":")
        given = Counter(int(number) for number in numbers.split(","))
        right = value == int(target) and used <= given
        return {"reward": float(right), "correct": right, "well_formed": 1.0}


def evaluate(text: str) -> tuple[int, Counter[int]] | None:
    """Return the value of an expression and the numbers it uses; None if it is not one. Runs no code."""
    text = text.strip()
    if len(text) > _LONGEST_EXPRESSION or not re.fullmatch(r"[0-9+\-*() ]+", text):
        return None
    try:
        tree = ast.parse(text, mode="eval")
        used: Counter[int] = Counter()
        return _value(tree.body, used), used
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: Counter[int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: int = _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
        return result
    raise ValueError("not + - * of whole numbers")
