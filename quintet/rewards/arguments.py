"""What a reward function is called with, read from its signature before it is called; other libraries' shapes are told apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from quintet.errors import UserError

_FOREIGN = {
    "completions": (
        "TRL's shape, which takes a list of completions and returns a list; here one sample is scored at a time. Turn it by "
        "`def reward(prompt, response, answer{row}): return {name}({columns})[0]` (where it "
        'takes chats, completions=[[{{"role": "assistant", "content": response}}]]) and name that one'
    ),
    "solution_str": (
        "verl's shape. Turn it by `def reward(prompt, response, answer{row}): return {name}({columns})` and name that one"
    ),
}
"""By a parameter that gives it away, another library's shape of a reward and how it becomes ours."""


class Arguments(NamedTuple):
    """What a function takes: the answer as its third argument, and the row of the data set as `row`. where: file:line of it."""

    answer: bool
    row: bool
    where: str


def arguments_of(spec: str, function: Callable[..., Any]) -> Arguments:
    """Return what a reward function is to be called with.

    Raises:
        UserError: nothing that it could be called with, or it has another library's shape; says how to turn it.
    """
    where = _where(spec, function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return Arguments(True, False, where)
    for parameter, shape in _FOREIGN.items():
        if parameter in signature.parameters:
            name = spec.rpartition(":")[2]
            raise UserError(
                f"reward.function: {where}: {name} has {shape.format(name=name, **_turned(signature))}"
            )
    if inspect.iscoroutinefunction(function):
        raise UserError(
            f"reward.function: {where}: it is `async`; a reward returns its number itself: write `def`, and asyncio.run(…) in it"
        )
    row = "row" in signature.parameters
    for answer in (True, False):
        try:
            signature.bind(*("", "", "")[: 2 + answer], **({"row": {}} if row else {}))
        except TypeError:
            continue
        return Arguments(answer, row, where)
    raise UserError(
        f"reward.function: {where}: it takes {signature}; a reward is called with prompt and response, then the answer if it takes "
        "three, and row=… if it has a parameter of that name: write `def reward(prompt, response, answer):`"
    )


def _turned(signature: inspect.Signature) -> dict[str, str]:
    """What calls another library's function for one sample, what it needs besides being columns of `row`; TRL's takes all as lists."""
    trl = "completions" in signature.parameters
    known = {"prompts": "prompt", "completions": "response", "answer": "answer"}
    known = known if trl else {"solution_str": "response", "ground_truth": "answer"}
    kinds = {name: one.kind.name for name, one in signature.parameters.items()}
    given = {name: ours for name, ours in known.items() if "VAR_KEYWORD" in kinds.values() or name in kinds}
    for name, one in signature.parameters.items():
        if name not in known and kinds[name][:4] != "VAR_" and (trl or one.default is one.empty):
            given[name] = f"row['{name}']"
    columns = ", ".join(f"{name}=[{ours}]" if trl else f"{name}={ours}" for name, ours in given.items())
    return {"columns": columns, "row": ", row" if given.keys() - known else ""}


def _where(spec: str, function: Callable[..., Any]) -> str:
    plain = inspect.unwrap(function if inspect.isroutine(function) else type(function).__call__)
    code = getattr(plain, "__code__", None)
    return spec if code is None else f"{code.co_filename}:{code.co_firstlineno}"
