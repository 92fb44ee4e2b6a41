"""Prompts: rows of a dataset or problems of a built-in task, rendered, tokenized and checked before anything starts."""

from __future__ import annotations

import hashlib
import random
import re
import string
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quintet.data.chat_template import KEY, ChatTemplate, TemplateFailure, own_template, render
from quintet.data.files import PackedRow, read_rows
from quintet.data.tasks import TASKS, draw_problems, make_task
from quintet.data.tokenizer import Tokenizer
from quintet.errors import UserError
from quintet.recipe.schema import Data

Which = Literal["train", "eval"]
Messages = list[dict[str, str]]

TRAIN_PROBLEMS = 16384
EVAL_PROBLEMS = 1024
"""Problems drawn of a built-in task, where it has as many."""

_GSM8K_INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, ready to generate from."""

    id: int
    """Index in the dataset."""
    messages_or_text: Messages | str
    """What was rendered: messages with the chat template, or text as it is."""
    token_ids: list[int]
    text: str
    """The rendered prompt, as the model sees it."""
    answer: str
    """Gold answer for the reward; "" where the dataset has none."""
    response: str | None
    """Response to imitate (SFT)."""
    response_ids: list[int]
    """Tokens of `response` with the end-of-sequence token; empty without a response."""
    source: str
    """Where it stands, for messages: "prompts.jsonl:17"."""


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a dataset, in its order."""

    prompts: list[Prompt]
    name: str

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def subset(self, count: int, seed: int) -> PromptSet:
        """Return `count` prompts drawn without repeats, in dataset order; all of them if there are no more."""
        if count >= len(self.prompts):
            return self
        chosen = random.Random(f"subset/{seed}").sample(range(len(self.prompts)), count)
        return PromptSet([self.prompts[i] for i in sorted(chosen)], self.name)

    def fingerprint(self) -> str:
        """Return the digest of the rendered prompts in order, to tell on resume that the data is still the same."""
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self.prompts:
            digest.update(prompt.text.encode() + b"\0")
        return digest.hexdigest()


@dataclass(frozen=True)
class _Draft:
    """A prompt before it is rendered."""

    source: str
    messages_or_text: Messages | str
    answer: str
    response: str | None


def load_prompts(
    data: Data, which: Which, tokenizer: Tokenizer, *, seed: int, needs: Collection[str] = ("answer",)
) -> PromptSet:
    """Read, render, tokenize and check every prompt of one side of the data.

    Args:
        data: the recipe's section.
        which: "train" or "eval".
        tokenizer: from `load_tokenizer` or `build_char_tokenizer`.
        seed: draws the problems of a built-in task; files are read whole, in order.
        needs: columns besides the prompt that every row must have: "answer" (rewards), "response" (SFT). With
            `data.answer_key` "" the dataset has no answers, and rewards get "".

    Raises:
        UserError: names the file, the line and what was expected.
    """
    if data.chat and tokenizer.chat_template is None:
        raise UserError(
            "data.chat is true, but the tokenizer has no chat template; "
            "set model.chat_template, or data.chat=false to feed prompts as they are"
        )
    drafts = _drafts(data, which, seed, needs)
    return PromptSet(_tokenize(drafts, data, tokenizer), _name(data, which))


def make_prompts(texts: list[str], data: Data, tokenizer: Tokenizer) -> list[Prompt]:
    """Return prompts of texts given by hand, rendered like those of a file."""
    drafts = [
        _Draft(f"prompt {i}", *_as_messages(text, data), "", None) for i, text in enumerate(texts, start=1)
    ]
    return _tokenize(drafts, data, tokenizer)


def check_rows(data: Data, which: Which, *, seed: int, needs: Collection[str] = ("answer",)) -> int:
    """Check every row as `load_prompts` does, short of rendering and tokenizing; how many there are.

    Needs no tokenizer, so that a recipe can be checked without the seconds a model library takes to import.

    Raises:
        UserError: as `load_prompts`.
    """
    return len(_drafts(data, which, seed, needs))


def alphabet_of(data: Data) -> str:
    """Return the characters a character tokenizer needs for this data: the task's own, or printable ASCII and the files'."""
    if data.task in TASKS:
        return make_task(data.task, data.task_options).alphabet
    characters = set(string.printable)
    for which, path in (("train", data.train_path), ("eval", data.eval_path)):
        if path is not None:
            for draft in _drafts(data, which, 0, ()):  # type: ignore[arg-type]
                characters.update(draft.response or "", *_texts(draft.messages_or_text))
    return "".join(sorted(characters))


def _name(data: Data, which: Which) -> str:
    return data.task if data.task in TASKS else str(data.train_path if which == "train" else data.eval_path)


def _drafts(data: Data, which: Which, seed: int, needs: Collection[str]) -> list[_Draft]:
    if data.task in TASKS:
        return _task_drafts(data, which, seed)
    if data.task_options:
        raise UserError(f"data.task_options are for built-in tasks ({', '.join(TASKS)}), not for {data.task}")
    path = data.train_path if which == "train" else data.eval_path
    if path is None:
        hint = "" if which == "train" else ", or train.eval_prompts=0 to evaluate nothing"
        raise UserError(
            f"data.{which}_path is not set; name a jsonl or parquet file, a directory or a hub dataset{hint}"
        )
    rows = read_rows(path, which)
    read = _gsm8k_draft if data.task == "gsm8k" else _draft
    return [read(row, data, needs) for row in rows]


def _task_drafts(data: Data, which: Which, seed: int) -> list[_Draft]:
    for key, path in (("train_path", data.train_path), ("eval_path", data.eval_path)):
        if path is not None:
            raise UserError(
                f"data.{key} is set, but the built-in task {data.task!r} reads no files; remove one of them"
            )
    task = make_task(data.task, data.task_options)
    problems = draw_problems(task, which, TRAIN_PROBLEMS if which == "train" else EVAL_PROBLEMS, seed)
    if not problems:
        raise UserError(
            f"task {data.task!r} with {data.task_options} has no {which} problems; make it larger"
        )
    return [
        _Draft(
            f"{data.task} {which} problem {i}",
            *_as_messages(task.prompt(p), data),
            task.answer(p),
            task.response(p),
        )
        for i, p in enumerate(problems)
    ]


def _draft(row: PackedRow, data: Data, needs: Collection[str]) -> _Draft:
    prompt = _column(row, data.prompt_key, "data.prompt_key")
    if isinstance(prompt, list):
        prompt = _check_messages(row.source, data.prompt_key, prompt, data)
    elif not isinstance(prompt, str) or not prompt:
        raise UserError(
            f"{row.source}: column {data.prompt_key!r} must be text or a list of chat messages, "
            f"got {_shown(prompt)}"
        )
    else:
        (prompt,) = _as_messages(prompt, data)
    answer = _text(row, data.answer_key, "data.answer_key", "answer" in needs and data.answer_key != "")
    response = _text(row, data.response_key, "data.response_key", "response" in needs)
    return _Draft(row.source, prompt, answer or "", response)


def _gsm8k_draft(row: PackedRow, data: Data, needs: Collection[str]) -> _Draft:
    """GSM8K's own columns: the answer is worked text that ends in "#### 18"."""
    keys = {
        name: getattr(data, name) if name in data.model_fields_set else default
        for name, default in (("prompt_key", "question"), ("answer_key", "answer"))
    }
    question = _text(row, keys["prompt_key"], "data.prompt_key", True) or ""
    worked = _text(row, keys["answer_key"], "data.answer_key", True) or ""
    reasoning, mark, gold = worked.rpartition("####")
    if not question or not mark or not gold.strip():
        raise UserError(
            f"{row.source}: expected a GSM8K row, a {keys['prompt_key']!r} and an {keys['answer_key']!r} "
            f'that ends in "#### <number>"; got {_shown(worked)}'
        )
    gold = gold.strip().replace(",", "")
    # Calculator marks like <<16-3-4=9>> are for a tool, not for a reader.
    reasoning = re.sub(r"<<[^<>]*>>", "", reasoning).strip()
    (prompt,) = _as_messages(f"{question.strip()}\n{_GSM8K_INSTRUCTION}", data)
    return _Draft(row.source, prompt, gold, f"{reasoning}\nThe answer is \\boxed{{{gold}}}.")


def _column(row: PackedRow, key: str, recipe_key: str) -> Any:
    if key not in row.columns:
        raise UserError(
            f"{row.source}: no column {key!r}; the row has {', '.join(map(repr, row.columns)) or 'none'}. "
            f"Name the right one with {recipe_key}"
        )
    return row.columns[key]


def _text(row: PackedRow, key: str, recipe_key: str, needed: bool) -> str | None:
    value = _column(row, key, recipe_key) if needed else row.columns.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        if needed or value is not None:
            raise UserError(f"{row.source}: column {key!r} must be text or a number, got {_shown(value)}")
        return None
    return str(value)


def _as_messages(text: str, data: Data) -> tuple[Messages | str]:
    if not data.chat:
        if data.system_prompt is not None:
            raise UserError(
                "data.system_prompt needs data.chat=true: without a chat template there is no place for it"
            )
        return (text,)
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt is not None else []
    return ([*system, {"role": "user", "content": text}],)


def _check_messages(source: str, key: str, messages: list[Any], data: Data) -> Messages:
    wanted = '[{"role": "user", "content": "text"}, …]'
    if not data.chat:
        raise UserError(f"{source}: column {key!r} is a list of messages, which needs data.chat=true")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            raise UserError(
                f"{source}: message {i} of column {key!r} is {_shown(message)}; expected {wanted}"
            )
    if not messages or messages[-1]["role"] == "assistant":
        raise UserError(f"{source}: column {key!r} must end in a message to respond to; expected {wanted}")
    if data.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise UserError(
            f"{source}: the messages have a system prompt of their own; remove data.system_prompt"
        )
    return [{"role": "system", "content": data.system_prompt}, *messages]


def _tokenize(drafts: list[_Draft], data: Data, tokenizer: Tokenizer) -> list[Prompt]:
    texts = _render(drafts, tokenizer)
    # A chat template writes the special tokens itself; raw text gets those the tokenizer puts around any text.
    token_ids = _encode(tokenizer, texts, special=not data.chat)
    answered = [i for i, draft in enumerate(drafts) if draft.response is not None]
    response_ids: list[list[int]] = [[] for _ in drafts]
    if answered:
        tokenized = _encode(tokenizer, [drafts[i].response or "" for i in answered], special=False)
        for i, ids in zip(answered, tokenized, strict=True):
            response_ids[i] = [*ids, tokenizer.eos_token_id]
    prompts = [
        Prompt(i, d.messages_or_text, ids, text, d.answer, d.response, response, d.source)
        for i, (d, text, ids, response) in enumerate(zip(drafts, texts, token_ids, response_ids, strict=True))
    ]
    _check_tokens(prompts, data, tokenizer)
    return prompts


def _encode(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=special, return_attention_mask=False)[
        "input_ids"
    ]
    return ids


def _render(drafts: list[_Draft], tokenizer: Tokenizer) -> list[str]:
    """As `tokenizer.apply_chat_template` does, in a process of limited time and memory."""
    chats = [draft for draft in drafts if not isinstance(draft.messages_or_text, str)]
    if not chats:
        return [str(draft.messages_or_text) for draft in drafts]
    if _renders_itself(tokenizer):
        return [_by_itself(tokenizer, draft) for draft in drafts]
    try:
        text = tokenizer.get_chat_template()
    except ValueError as error:  # there is none, or several with none called default
        raise UserError(
            f"{chats[0].source}: the tokenizer in {tokenizer.name_or_path} does not say how to write conversations "
            f"({str(error).splitlines()[0]}); give {KEY}, Jinja text or a file"
        ) from None
    own = own_template(Path(tokenizer.name_or_path))
    template = own if own is not None and own.text == text else ChatTemplate(text, KEY)
    try:
        return render(template, [d.messages_or_text for d in chats], tokenizer.special_tokens_map)
    except TemplateFailure as failed:
        raise UserError(
            f"{chats[failed.number].source}: the chat template cannot render this prompt: {failed}"
        ) from None


def _renders_itself(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer came with code of its own for it, which then is trusted: no other is loaded."""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


def _by_itself(tokenizer: Tokenizer, draft: _Draft) -> str:
    chat = draft.messages_or_text
    if isinstance(chat, str):
        return chat
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except Exception as error:
        raise UserError(
            f"{draft.source}: the tokenizer's own code cannot render this prompt: {type(error).__name__}: {error}"
        ) from error


def _check_tokens(prompts: list[Prompt], data: Data, tokenizer: Tokenizer) -> None:
    limit = data.max_prompt_tokens
    too_long = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if too_long:
        others = f" ({len(too_long) - 1} more are too long as well)" if len(too_long) > 1 else ""
        longest = max(len(prompt.token_ids) for prompt in too_long)
        raise UserError(
            f"{too_long[0].source}: the prompt has {len(too_long[0].token_ids)} tokens, more than "
            f"data.max_prompt_tokens={limit}{others}; shorten it, or set data.max_prompt_tokens={longest}"
        )
    specials = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id not in specials else None
    for prompt in prompts:
        if not prompt.token_ids:
            raise UserError(f"{prompt.source}: the prompt is empty after rendering; expected some text")
        if unknown is not None and unknown in prompt.token_ids + prompt.response_ids:
            raise UserError(
                f"{prompt.source}: the tokenizer does not know some characters of {_shown(prompt.text)}; "
                "use a tokenizer that covers the data"
            )


def _texts(messages_or_text: Messages | str) -> list[str]:
    if isinstance(messages_or_text, str):
        return [messages_or_text]
    return [message["content"] for message in messages_or_text]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
