"""Rules of data and rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quintet.recipe.paths import HUB_NAME, is_file
from quintet.recipe.problem import Problem
from quintet.recipe.rules.facts import Facts, rule
from quintet.recipe.schema import BUILT_IN_REWARDS


@rule
def data_is_named(facts: Facts) -> Iterator[Problem]:
    """A task that reads files names those its command needs, and a built-in task names none."""
    data, train = facts.recipe.data, facts.recipe.train
    paths = {"data.train_path": data.train_path, "data.eval_path": data.eval_path}
    for key, path in {**paths, "data.sft_path": data.sft_path}.items():
        if path is not None and not Path(path).exists() and not HUB_NAME.fullmatch(path):
            yield Problem(f"{key}: there is no file {path} (looked in {Path.cwd()})")
    if data.sft_path is not None and facts.command == "train" and facts.recipe.sft is None:
        yield Problem("data.sft_path is not read without a section sft; add one, or remove it")
    if data.makes_problems:
        for key, path in paths.items():
            if path is not None:
                yield Problem(
                    f"{key} is set, but data.task={data.task} makes its own problems; remove it, or use data.task=jsonl"
                )
        return
    of_its_own = facts.command == "sft" and facts.recipe.sft is not None and data.sft_path is not None
    if data.train_path is None and facts.command in ("train", "sft") and not of_its_own:
        yield Problem(
            f"data.train_path is not set; data.task={data.task} needs a jsonl, parquet or csv file, a directory or a hub name"
        )
    if data.eval_path is None and facts.command in ("train", "eval") and train.eval_prompts:
        instead = ", or train.eval_prompts=0 to evaluate nothing" if facts.command == "train" else ""
        yield Problem(f"data.eval_path is not set; name held-out prompts{instead}", "data.task")


@rule
def task_options_are_read(facts: Facts) -> Iterator[Problem]:
    """Only built-in tasks have options."""
    data = facts.recipe.data
    if data.task_options and not data.makes_problems:
        yield Problem(
            f"data.task_options are for the built-in tasks addition and countdown; data.task={data.task} reads none"
        )


@rule
def system_prompt_needs_chat(facts: Facts) -> Iterator[Problem]:
    """A system prompt has a place only in a chat."""
    data = facts.recipe.data
    if data.system_prompt is not None and not data.chat:
        yield Problem("data.system_prompt needs data.chat=true: prompts fed as they are have no place for it")


@rule
def reward_has_its_time(facts: Facts) -> Iterator[Problem]:
    """One sample's time to be scored is within that of a step."""
    reward = facts.recipe.reward
    if reward.timeout_s > reward.step_timeout_s:
        yield Problem(
            f"reward.timeout_s={reward.timeout_s:g} is never reached: a step's rewards have "
            f"reward.step_timeout_s={reward.step_timeout_s:g}; lower the first or raise the second"
        )


@rule
def reward_is_there(facts: Facts) -> Iterator[Problem]:
    """A reward is built in, or a user's own function named with its module or file."""
    function = facts.recipe.reward.function
    where, colon, name = function.rpartition(":")
    if function in BUILT_IN_REWARDS:
        return
    if not colon or not where or not name.isidentifier():
        if function.endswith(".py"):
            yield Problem(f"reward.function={function}: which function of the file? Write {function}:NAME")
            return
        yield Problem(
            f"reward.function={function}: expected {', '.join(BUILT_IN_REWARDS)}, module:function or file.py:function"
        )
    elif where.endswith(".py") and not is_file(where):
        yield Problem(f"reward.function: there is no file {where} (looked in {Path.cwd()})")
