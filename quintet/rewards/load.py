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
from quintet.recipe.user_code import load_named
from quintet.rewards import verifiers

BUILT_IN: dict[str, Callable[[str, str, str], Any]] = {
    "math": verifiers.math,
    "gsm8k": verifiers.gsm8k,
    "exact_match": verifiers.exact_match,
    "length": verifiers.length,
    **{name: task.verify for name, task in TASKS.items()},
}
_EXPECTED = 'a finite number, or a dict with "reward" and further numbers to log'


@dataclass(frozen=True)
class RewardResult:
    reward: float
    metrics: dict[str, float]
    """What else the function returned, by name, such as `well_formed`."""
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


class RewardFailure(UserError):
    """A function gave no reward for a sample: it raised, or returned no finite number."""


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward, called as (prompt, response, answer). Pickles as its name and loads again where it arrives."""

    spec: str
    function: Callable[[str, str, str], Any] = field(compare=False, repr=False)

    def __call__(self, prompt: str, response: str, answer: str) -> RewardResult:
        """Score one sample.

        Raises:
            RewardFailure: the function raised, or returned no finite number.
            UserError: the function cannot score at all, such as for want of a package.
        """
        try:
            value = self.function(prompt, response, answer)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # a script's function may call sys.exit
            raise RewardFailure(
                f"reward {self.spec} raised {type(error).__name__}: {error}{_sample(prompt, response, answer)}\n"
                + traceback.format_exc()
            ) from error
        timed_out = isinstance(value, verifiers.TimedOut)
        if not isinstance(value, Mapping):
            value = {"reward": value}
        if "reward" not in value:
            got = ", ".join(map(repr, value)) or "nothing"
            raise RewardFailure(
                f'reward {self.spec} returned a dict without "reward", with {got}; expected {_EXPECTED}'
                + _sample(prompt, response, answer)
            )
        numbers = {str(name): self._number(name, v, prompt, response, answer) for name, v in value.items()}
        return RewardResult(numbers.pop("reward"), numbers, timed_out)

    def __reduce__(self) -> tuple[Any, ...]:
        return (load_reward, (self.spec,))

    def _number(self, name: Any, value: Any, prompt: str, response: str, answer: str) -> float:
        number = math.nan
        if not isinstance(value, str | bytes | type(None)):
            with suppress(TypeError, ValueError, RuntimeError, OverflowError):
                number = float(value)
        if not math.isfinite(number):
            what = f"{value!r:.80}" if name == "reward" else f"{value!r:.80} as {name!r}"
            raise RewardFailure(
                f"reward {self.spec} returned {what}; expected {_EXPECTED}{_sample(prompt, response, answer)}"
            )
        return number


def load_reward(spec: str) -> RewardFunction:
    """Return the reward `spec` names.

    Args:
        spec: "math", "gsm8k", "exact_match", "length", a built-in task's name, "module:function", or
            "path/file.py:function" (relative to the working directory).

    Raises:
        UserError: there is no such reward, module, file or function, or it cannot be imported or called.
    """
    if ":" not in spec:
        if spec not in BUILT_IN:
            raise UserError(
                f"reward.function: there is no reward {spec!r}; built in are {', '.join(BUILT_IN)}, and your own is "
                "named module:function or file.py:function"
            )
        return RewardFunction(spec, BUILT_IN[spec])
    function, spec = load_named("reward.function", spec, "function", callable)
    return RewardFunction(spec, function)


def _sample(prompt: str, response: str, answer: str) -> str:
    return f"\n  prompt:   {prompt!r:.200}\n  response: {response!r:.200}\n  answer:   {answer!r:.200}"
