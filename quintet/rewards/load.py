"""Rewards by name, and the user's own functions; calling them with errors that say which function failed on what."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from quintet.data.tasks import TASKS
from quintet.errors import UserError
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


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward, called as (prompt, response, answer). Pickles as its name and loads again where it arrives."""

    spec: str
    function: Callable[[str, str, str], Any] = field(compare=False, repr=False)

    def __call__(self, prompt: str, response: str, answer: str) -> RewardResult:
        """Score one sample.

        Raises:
            UserError: the function raised, or returned no finite number.
        """
        try:
            value = self.function(prompt, response, answer)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"reward {self.spec} raised {type(error).__name__}: {error}{_sample(prompt, response, answer)}\n"
                + traceback.format_exc()
            ) from error
        if not isinstance(value, Mapping):
            value = {"reward": value}
        if "reward" not in value:
            got = ", ".join(map(repr, value)) or "nothing"
            raise UserError(
                f'reward {self.spec} returned a dict without "reward", with {got}; expected {_EXPECTED}'
                + _sample(prompt, response, answer)
            )
        numbers = {str(name): self._number(name, v, prompt, response, answer) for name, v in value.items()}
        return RewardResult(numbers.pop("reward"), numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        return (load_reward, (self.spec,))

    def _number(self, name: Any, value: Any, prompt: str, response: str, answer: str) -> float:
        number = math.nan
        if not isinstance(value, str | bytes | type(None)):
            with suppress(TypeError, ValueError, RuntimeError, OverflowError):
                number = float(value)
        if not math.isfinite(number):
            what = f"{value!r:.80}" if name == "reward" else f"{value!r:.80} as {name!r}"
            raise UserError(
                f"reward {self.spec} returned {what}; expected {_EXPECTED}{_sample(prompt, response, answer)}"
            )
        return number


def load_reward(spec: str) -> RewardFunction:
    """The reward `spec` names.

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
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        module = _load_file(path)
        spec = f"{path}:{name}"
    else:
        module = _load_module(place)
    if not hasattr(module, name):
        defined = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(
            f"reward.function: {place} has no function {name!r}; it has {', '.join(defined) or 'no functions'}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"reward.function: {name!r} in {place} is {type(function).__name__}, not a function")
    return RewardFunction(spec, function)


def score(
    reward: RewardFunction, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]
) -> list[RewardResult]:
    """Score samples one by one, in order.

    Args:
        prompts, responses, answers: one text a sample each.

    Raises:
        UserError: as `RewardFunction` does.
    """
    return [reward(*sample) for sample in zip(prompts, responses, answers, strict=True)]


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"reward.function: there is no file {path}")
    return _execute(path, path.stat().st_mtime_ns)


@functools.cache
def _execute(path: Path, changed_ns: int) -> ModuleType:
    """Once a process: a reward travels to the ranks at every step, and what its file sets up must last."""
    name = f"quintet_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"reward.function: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a module up by its name while it is still being imported.
    sys.modules[name] = module
    # The file may import its neighbours, as it could when run as a script.
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_error(str(path), error) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UserError(
                f"reward.function: there is no module {name!r}; for a file write path/file.py:function"
            ) from None
        raise _import_error(name, error) from error
    except Exception as error:
        raise _import_error(name, error) from error


def _import_error(name: str, error: Exception) -> UserError:
    return UserError(
        f"reward.function: importing {name} failed with {type(error).__name__}: {error}\n{traceback.format_exc()}"
    )


def _sample(prompt: str, response: str, answer: str) -> str:
    return f"\n  prompt:   {prompt!r:.200}\n  response: {response!r:.200}\n  answer:   {answer!r:.200}"
