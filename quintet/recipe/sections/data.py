"""Prompts and what their responses are worth."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from quintet.recipe.sections.fields import PositiveFloat, PositiveInt, Section, Timeout, UserPathText


class Data(Section):
    task: Literal["addition", "countdown", "gsm8k", "jsonl"] = "jsonl"
    """Built-in synthetic task (no files), or the shape of the files under train_path and eval_path."""
    train_path: UserPathText | None = None
    """jsonl, parquet or csv file, directory saved by `datasets`, or hub name (docs/data.md)."""
    eval_path: UserPathText | None = None
    sft_path: UserPathText | None = None
    """What SFT imitates, where that is not train_path: rows with prompt_key and response_key, whatever the task."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages. "question" unless named when task is gsm8k."""
    answer_key: str = "answer"
    """Column with the answer that rewards get; "" where there is none."""
    eval_prompt_key: str | None = None
    """The same of eval_path; null is prompt_key."""
    eval_answer_key: str | None = None
    """null is answer_key."""
    response_key: str = "response"
    """Column with the response to imitate (sft)."""
    system_prompt: str | None = None
    chat: bool = True
    """Render prompts with the chat template; false feeds the text as it is."""
    max_prompt_tokens: PositiveInt = 1024
    """Of a prompt as it is rendered; long_prompts says what becomes of a longer one."""
    long_prompts: Literal["error", "drop", "cut_left"] = "error"
    """error names the file and line, drop leaves the prompt out, cut_left keeps its last tokens; how many there were is told."""
    shuffle: bool = True
    task_options: dict[str, int] = {}
    """Options of a synthetic task, such as digits."""

    @property
    def makes_problems(self) -> bool:
        """Whether the task makes its own problems, and reads no files but those of SFT."""
        return self.task in ("addition", "countdown")

    @model_validator(mode="after")
    def _columns_of_gsm8k(self) -> Self:
        # Written into the field, so that the resolved recipe says it and reads back to the same.
        if self.task == "gsm8k" and "prompt_key" not in self.model_fields_set:
            self.prompt_key = "question"
        return self


BUILT_IN_REWARDS = ("math", "gsm8k", "exact_match", "length", "addition", "countdown")
"""A built-in task's own reward has its name."""


class Reward(Section):
    function: str = "math"
    """One of BUILT_IN_REWARDS, or a user's own `file.py:function`, or `module:function` of a module that is installed or on
    PYTHONPATH. math gives a response 0.2 s of processor time, and then 0 (metric reward/timed_out)."""
    overlong_tokens: PositiveInt | None = None
    """The last tokens before rollout.max_response_tokens in which a response loses reward, ever more up to overlong_penalty (DAPO's
    soft overlong punishment); null takes nothing off."""
    overlong_penalty: PositiveFloat = 1.0
    timeout_s: Timeout = 60.0
    """Longest that one sample may take to be scored; then its process is replaced, and reward.on_error decides."""
    step_timeout_s: Timeout = 600.0
    """Longest that a step waits for its rewards when all its responses are there; reward.on_error decides about those missing."""
    on_error: Literal["stop", "zero"] = "stop"
    """When a sample cannot be scored (the function raises, returns no finite number, takes too long, or its process dies): stop
    ends the run with the sample, zero counts it as 0 (metric reward/failed)."""
