"""Rewards by name, and the user's own functions; calling them with errors that say which function failed on what."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from quintet.data.tasks import TASKS
from quintet.errors import UserError
from quintet.recipe.user_code import load_named, traceback_of
from quintet.rewards import verifiers
from quintet.rewards.arguments import Arguments, arguments_of
from quintet.rewards.result import RewardResult
from quintet.runs.ledger import OF_REWARDS


def _judge(verify: Callable[[str, str, str], float]) -> Callable[[str, str, str], dict[str, float]]:
    """A reward that is 1 for a correct response, and says that it is."""

    def judge(prompt: str, response: str, answer: str) -> dict[str, float]:
        reward = verify(prompt, response, answer)
        return {"reward": reward, "correct": reward == 1}

    return judge


BUILT_IN: dict[str, Callable[..., Any]] = {
    "math": _judge(verifiers.math),
    "gsm8k": _judge(verifiers.gsm8k),
    "exact_match": _judge(verifiers.exact_match),
    "length": verifiers.length,
    **{name: task.verify for name, task in TASKS.items()},
}
_LARGEST = 1e18
"""Advantages are of squares in fp32."""
_EXPECTED = 'a number, finite and below 1e18, or a dict with "reward", if it can be told "correct" (True or False), and further numbers to log'


class RewardFailure(UserError):
    """A function gave no reward for a sample: it raised, or returned no finite number."""


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward, called as (prompt, response, answer, row). Pickles as its name and loads again where it arrives."""

    spec: str
    function: Callable[..., Any] = field(compare=False, repr=False)
    takes: Arguments = field(compare=False)

    def __call__(
        self, prompt: str, response: str, answer: str, row: Mapping[str, Any] | None = None
    ) -> RewardResult:
        """Score one sample. row: the columns of the data set.

        Raises:
            RewardFailure: the function raised, or returned no finite number.
            UserError: the function cannot score at all, such as for want of a package.
        """
        sample = f"\n  prompt:   {prompt!r:.200}\n  response: {response!r:.200}\n  answer:   {answer!r:.200}"
        texts = (prompt, response, answer) if self.takes.answer else (prompt, response)
        try:
            value = self.function(*texts, **({"row": dict(row or {})} if self.takes.row else {}))
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # a script's function may call sys.exit
            raise RewardFailure(
                f"{self._named(error)} raised {type(error).__name__}: {error}{sample}\n{traceback_of(error)}"
            ) from error
        try:
            return _result(value)
        except _NoReward as no:
            raise RewardFailure(f"{self._named()} returned {no}{sample}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return (load_reward, (self.spec,))

    def _named(self, error: BaseException | None = None) -> str:
        """The reward with file and line: where it raised, if that is in its file, or where it begins."""
        file, _, line = self.takes.where.rpartition(":")
        for frame in traceback.extract_tb(error.__traceback__) if error is not None else ():
            if frame.filename == file:
                line = str(frame.lineno)
        return f"reward {self.spec}" + (f" ({file}:{line})" if ":" in self.spec else "")


class _NoReward(Exception):
    """What was returned is no reward; says what it is and what to do."""


def _result(value: Any) -> RewardResult:
    told = value if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in told:
        got = ", ".join(map(repr, told)) or "nothing"
        raise _NoReward(
            f'a dict without "reward", with {got}; expected {_EXPECTED}: put the number that is to be learnt from under "reward"'
        )
    if ours := sorted(OF_REWARDS & set(told)):
        raise _NoReward(
            f"a number called {ours[0]!r}, which quintet calls a metric of its own; name it otherwise"
        )
    numbers = {str(name): _number(name, one) for name, one in told.items()}
    correct = numbers.pop("correct", None)
    if correct not in (None, 0, 1):
        raise _NoReward(
            f'{told["correct"]!r:.80} as "correct"; expected True or False, and points for a part of an answer in "reward"'
        )
    timed_out = isinstance(told["reward"], verifiers.TimedOut)
    return RewardResult(numbers.pop("reward"), numbers, None if correct is None else bool(correct), timed_out)


def _number(name: Any, value: Any) -> float:
    number = math.nan
    if not isinstance(value, str | bytes | type(None)):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            number = float(value)
    if abs(number) < _LARGEST:
        return number
    what = f"{value!r:.80}" if name == "reward" else f"{value!r:.80} as {name!r}"
    hints: dict[Any, str] = {
        type(None): "does every path through the function end in `return` with a number?",
        str: "text is no number: return float(…) of it",
        list: "one sample is scored at a time: return its one number",
        float | int: "where it divides or takes a mean of nothing, let it return 0.0",
        object: "return float(…) of it",
    }
    hint = next(hint for kind, hint in hints.items() if isinstance(value, kind))
    raise _NoReward(f"{what}; expected {_EXPECTED}: {hint}")


def load_reward(spec: str) -> RewardFunction:
    """Return the reward `spec` names.

    Args:
        spec: "math", "gsm8k", "exact_match", "length", a built-in task's name, "module:function", or
            "path/file.py:function" (relative to the working directory).

    Raises:
        UserError: there is no such reward, module, file or function, or it cannot be imported or called.
    """
    if ":" in spec:
        function, spec = load_named("reward.function", spec, "function", callable)
    elif (function := BUILT_IN.get(spec)) is None:
        raise UserError(
            f"reward.function: there is no reward {spec!r}; built in are {', '.join(BUILT_IN)}, and your own is "
            "named module:function or file.py:function"
        )
    return RewardFunction(spec, function, arguments_of(spec, function))
