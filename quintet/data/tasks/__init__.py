"""Built-in tasks that need no download: one small file a task.

A task is a frozen dataclass whose integer fields are its options (`data.task_options`), with the methods of `Task`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, Protocol

from quintet.data.tasks.addition import Addition
from quintet.data.tasks.countdown import Countdown
from quintet.errors import UserError

TASKS: dict[str, type[Any]] = {"addition": Addition, "countdown": Countdown}

EVAL_SHARE = 1 / 8
"""Share of the canonical problems that is held out for evaluation."""


class Task(Protocol):
    """What a built-in task tells about itself. A problem is any value the task likes."""

    @property
    def alphabet(self) -> str:
        """Every character that can stand in a prompt or a right response."""

    def sample(self, rng: random.Random) -> Any:
        """Return a random problem."""

    def canonical(self, problem: Any) -> str:
        """Return text that is equal for exactly those problems that are the same under the task's symmetries."""

    def prompt(self, problem: Any) -> str: ...

    def response(self, problem: Any) -> str:
        """Return a right response, to imitate in SFT."""

    def answer(self, problem: Any) -> str:
        """Return what `verify` needs to know of the problem, as text."""

    @staticmethod
    def verify(prompt: str, response: str, answer: str) -> dict[str, float]:
        """Return `reward` (1 if right, else 0), `correct`, and `well_formed` (1 if it is an answer at all, right or wrong)."""


def make_task(name: str, options: Mapping[str, int]) -> Task:
    """Return the built-in task `name` with its options.

    Raises:
        UserError: no such option, or a value the task cannot use.
    """
    kind = TASKS[name]
    known = {field.name: field.default for field in fields(kind)}
    unknown = sorted(set(options) - set(known))
    if unknown:
        valid = ", ".join(f"{option} (default {default})" for option, default in known.items())
        raise UserError(
            f"data.task_options has {unknown[0]!r}, which task {name!r} does not know; it has {valid}"
        )
    try:
        task: Task = kind(**options)
    except ValueError as error:
        raise UserError(f"data.task_options of task {name!r}: {error}") from None
    return task


def is_held_out(canonical: str) -> bool:
    """Return whether a problem belongs to evaluation. Depends on the problem alone: no seed moves one across."""
    digest = hashlib.blake2b(canonical.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < EVAL_SHARE * 2**64


def draw_problems(task: Task, which: Literal["train", "eval"], count: int, seed: int) -> list[Any]:
    """Return up to `count` problems of one side of the split, reproducible by `seed`.

    Held-out problems all differ in canonical form, training problems in their prompt. There are fewer than `count`
    when the task hardly has more: when 2000 draws in a row bring nothing new.
    """
    rng = random.Random(f"{which}/{seed}")
    seen: set[str] = set()
    problems: list[Any] = []
    misses = 0
    while len(problems) < count and misses < 2000:
        misses += 1
        problem = task.sample(rng)
        canonical = task.canonical(problem)
        key = canonical if which == "eval" else task.prompt(problem)
        if is_held_out(canonical) == (which == "eval") and key not in seen:
            seen.add(key)
            problems.append(problem)
            misses = 0
    return problems
