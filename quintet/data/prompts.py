"""Prompts: rows of a dataset or problems of a built-in task, rendered, tokenized and checked before anything starts."""

from __future__ import annotations

import hashlib
import json
import random
import re
import string
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from quintet.data.chat_template import KEY, ChatTemplate, TemplateFailure, own_template, render
from quintet.data.files import FileRow, read_rows
from quintet.data.tasks import draw_problems, make_task
from quintet.data.tokenizer import Tokenizer
from quintet.errors import UserError
from quintet.recipe.schema import Data

Which = Literal["train", "eval", "sft"]
"""A side of the data: sft is what SFT imitates where that is not the training prompts."""
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
    row: dict[str, Any] = field(default_factory=dict)
    """Columns of the row that it was made of, for rewards that read them."""


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a dataset, in its order."""

    prompts: list[Prompt]
    name: str
    notes: tuple[str, ...] = ()
    """What is to be told of it, such as prompts that were left out."""

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
        return PromptSet([self.prompts[i] for i in sorted(chosen)], self.name, self.notes)

    def fingerprint(self) -> str:
        """Return the digest of prompts, answers and responses in order, to tell on resume that the data is still the same: as they were given,
        for a chat template may write the date."""
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self.prompts:
            given = (prompt.messages_or_text, prompt.answer, prompt.response)
            digest.update(json.dumps(given).encode() + b"\0")
        return digest.hexdigest()


@dataclass(frozen=True)
class _Draft:
    """A prompt before it is rendered."""

    source: str
    messages_or_text: Messages | str
    answer: str
    response: str | None
    row: dict[str, Any] = field(default_factory=dict)


def load_prompts(
    data: Data, which: Which, tokenizer: Tokenizer, *, seed: int, needs: Collection[str] = ("answer",)
) -> PromptSet:
    """Read, render, tokenize and check every prompt of one side of the data.

    Args:
        data: the recipe's section.
        which: "train", "eval" or "sft".
        tokenizer: from `load_tokenizer` or `build_char_tokenizer`.
        seed: draws the problems of a built-in task; files are read whole, in order.
        needs: columns besides the prompt that every row must have: "answer" (rewards), "response" (SFT). With
            `data.answer_key` "" the dataset has no answers, and rewards get "".

    Raises:
        UserError: names the file, the line and what was expected. What the recipe's rules refuse is not looked at here.
    """
    if data.chat and tokenizer.chat_template is None and not _renders_itself(tokenizer):
        raise UserError(
            "data.chat is true, but the tokenizer has no chat template; "
            "set model.chat_template, or data.chat=false to feed prompts as they are"
        )
    drafts = _drafts(data, which, seed, needs)
    return _tokenize(drafts, data, tokenizer, path_of(data, which) or data.task)


def make_prompts(texts: Sequence[str | Messages], data: Data, tokenizer: Tokenizer) -> PromptSet:
    """Return prompts of texts or conversations given by hand, rendered like those of a file; none is dropped."""
    if data.long_prompts == "drop":
        data = data.model_copy(update={"long_prompts": "error"})
    drafts = [
        _Draft(source, _given(source, "it", text, data), "", None)
        for source, text in ((f"prompt {i}", text) for i, text in enumerate(texts, start=1))
    ]
    return _tokenize(drafts, data, tokenizer, "the prompts given")


def check_rows(data: Data, which: Which, *, seed: int, needs: Collection[str] = ("answer",)) -> int:
    """Check every row as `load_prompts` does, short of rendering and tokenizing; how many there are.

    Needs no tokenizer, so that a recipe can be checked without the seconds a model library takes to import.

    Raises:
        UserError: as `load_prompts`.
    """
    return len(_drafts(data, which, seed, needs))


def alphabet_of(data: Data, *, download: bool = True) -> str:
    """Return the characters a character tokenizer needs for this data: the task's own, or printable ASCII and the files'.

    download: false leaves out what is on the hub.
    """
    task = make_task(data.task, data.task_options) if data.makes_problems else None
    characters = set(string.printable if task is None else task.alphabet)
    for which in _SIDES:
        path = path_of(data, which)
        if path is not None and (download or is_local(path)):
            for draft in _drafts(data, which, 0, ()):
                characters.update(draft.response or "", *_texts(draft.messages_or_text))
    return "".join(sorted(characters))


def path_of(data: Data, which: Which) -> str | None:
    """Return where one side of the data is; None where nothing is named."""
    return {"train": data.train_path, "eval": data.eval_path, "sft": data.sft_path}[which]


def is_local(path: str) -> bool:
    """Return whether it is a file or directory here, rather than a hub name."""
    return Path(path).expanduser().exists()


_SIDES: tuple[Which, ...] = ("train", "eval", "sft")


def _drafts(data: Data, which: Which, seed: int, needs: Collection[str]) -> list[_Draft]:
    if data.makes_problems and which != "sft":
        return _task_drafts(data, which, seed)
    path = path_of(data, which)
    assert path is not None, f"data.{which}_path: the rule data_is_named wants it"
    rows = read_rows(path, which)
    read = _gsm8k_draft if data.task == "gsm8k" and which != "sft" else _draft
    columns = _columns(data, which)
    return [read(row, data, needs, columns) for row in rows]


class _Columns(NamedTuple):
    """Columns of one side with the recipe keys that name them."""

    prompt: str
    answer: str
    prompt_from: str
    answer_from: str


def _columns(data: Data, which: Which) -> _Columns:
    of = "eval_" if which == "eval" else ""
    names = [getattr(data, f"{of}{one}") for one in ("prompt_key", "answer_key")]
    prompt, answer = (
        b if a is None else a for a, b in zip(names, (data.prompt_key, data.answer_key), strict=True)
    )
    return _Columns(prompt, answer, f"data.{of}prompt_key", f"data.{of}answer_key")


def _task_drafts(data: Data, which: Literal["train", "eval"], seed: int) -> list[_Draft]:
    task = make_task(data.task, data.task_options)
    problems = draw_problems(task, which, TRAIN_PROBLEMS if which == "train" else EVAL_PROBLEMS, seed)
    if not problems:
        raise UserError(
            f"task {data.task!r} with {data.task_options} has no {which} problems; make it larger"
        )
    return [
        _Draft(
            f"{data.task} {which} problem {i}",
            _as_given(task.prompt(p), data),
            task.answer(p),
            task.response(p),
        )
        for i, p in enumerate(problems)
    ]


def _draft(row: FileRow, data: Data, needs: Collection[str], columns: _Columns) -> _Draft:
    given = _column(row, columns.prompt, columns.prompt_from)
    prompt = _given(row.source, f"column {columns.prompt!r}", given, data)
    answer = _text(row, columns.answer, columns.answer_from, "answer" in needs and columns.answer != "")
    response = _text(row, data.response_key, "data.response_key", "response" in needs)
    return _Draft(row.source, prompt, answer or "", response, row.columns)


def _given(source: str, what: str, prompt: Any, data: Data) -> Messages | str:
    """A prompt as it was given, text or messages, as it is rendered. what: the column that it is in, as messages name it."""
    if isinstance(prompt, list):
        return _check_messages(source, what, prompt, data)
    # An argument that is no UTF-8 holds halves of surrogate pairs, which no tokenizer takes.
    if not isinstance(prompt, str) or not prompt or prompt.encode(errors="ignore").decode() != prompt:
        raise UserError(f"{source}: {what} must be text or a list of chat messages, got {_shown(prompt)}")
    return _as_given(prompt, data)


def _gsm8k_draft(row: FileRow, data: Data, needs: Collection[str], columns: _Columns) -> _Draft:
    """GSM8K's own columns: the answer is worked text that ends in "#### 18"."""
    question = _text(row, columns.prompt, columns.prompt_from, True) or ""
    worked = _text(row, columns.answer, columns.answer_from, True) or ""
    reasoning, mark, gold = worked.rpartition("####")
    if not question or not mark or not gold.strip():
        raise UserError(
            f"{row.source}: expected a GSM8K row, a {columns.prompt!r} and an {columns.answer!r} "
            f'that ends in "#### <number>"; got {_shown(worked)}'
        )
    gold = gold.strip().replace(",", "")
    # Calculator marks like <<16-3-4=9>> are for a tool, not for a reader.
    reasoning = re.sub(r"<<[^<>]*>>", "", reasoning).strip()
    prompt = _as_given(f"{question.strip()}\n{_GSM8K_INSTRUCTION}", data)
    return _Draft(row.source, prompt, gold, f"{reasoning}\nThe answer is \\boxed{{{gold}}}.", row.columns)


def _column(row: FileRow, key: str, recipe_key: str) -> Any:
    if key not in row.columns:
        raise UserError(
            f"{row.source}: no column {key!r}; the row has {', '.join(map(repr, row.columns)) or 'none'}. "
            f"Name the right one with {recipe_key}"
        )
    return row.columns[key]


def _text(row: FileRow, key: str, recipe_key: str, needed: bool) -> str | None:
    value = _column(row, key, recipe_key) if needed else row.columns.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:  # NaN
        if needed:
            raise UserError(f"{row.source}: column {key!r} must be text or a number, got {_shown(value)}")
        return None
    return str(value)


def _as_given(text: str, data: Data) -> Messages | str:
    """A text as it is, or what a user says in a chat."""
    if not data.chat:
        return text
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt is not None else []
    return [*system, {"role": "user", "content": text}]


def _check_messages(source: str, what: str, messages: list[Any], data: Data) -> Messages:
    wanted = '[{"role": "user", "content": "text"}, …]'
    if not data.chat:
        raise UserError(f"{source}: {what} is a list of messages, which needs data.chat=true")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            raise UserError(f"{source}: message {i} of {what} is {_shown(message)}; expected {wanted}")
    if not messages or messages[-1]["role"] == "assistant":
        raise UserError(f"{source}: {what} must end in a message to respond to; expected {wanted}")
    if data.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise UserError(
            f"{source}: the messages have a system prompt of their own; remove data.system_prompt"
        )
    return [{"role": "system", "content": data.system_prompt}, *messages]


def _tokenize(drafts: list[_Draft], data: Data, tokenizer: Tokenizer, name: str) -> PromptSet:
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
        Prompt(i, d.messages_or_text, ids, text, d.answer, d.response, response, d.source, d.row)
        for i, (d, text, ids, response) in enumerate(zip(drafts, texts, token_ids, response_ids, strict=True))
    ]
    prompts, notes = _fitting(prompts, data, tokenizer, name)
    _check_tokens(prompts, tokenizer)
    return PromptSet(prompts, name, notes)


def _fitting(
    prompts: list[Prompt], data: Data, tokenizer: Tokenizer, name: str
) -> tuple[list[Prompt], tuple[str, ...]]:
    """Prompts of at most data.max_prompt_tokens, as data.long_prompts says, and what there is to say of it."""
    limit = data.max_prompt_tokens
    too_long = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if not too_long:
        return prompts, ()
    if data.long_prompts == "error":
        others = f" ({len(too_long) - 1} more are too long as well)" if len(too_long) > 1 else ""
        longest = max(len(prompt.token_ids) for prompt in too_long)
        raise UserError(
            f"{too_long[0].source}: the prompt has {len(too_long[0].token_ids)} tokens, more than "
            f"data.max_prompt_tokens={limit}{others}; shorten it, set data.max_prompt_tokens={longest}, or leave such prompts out "
            "(data.long_prompts=drop) or cut their beginning off (cut_left)"
        )
    told = f"{len(too_long)} of {len(prompts)} prompts in {name} have more than data.max_prompt_tokens={limit} tokens"
    if data.long_prompts == "drop":
        if len(too_long) == len(prompts):
            raise UserError(f"{told}, and data.long_prompts=drop leaves none; raise data.max_prompt_tokens")
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
        return kept, (f"{told} and are left out (data.long_prompts=drop).",)
    return [_cut_left(prompt, limit, tokenizer) for prompt in prompts], (
        f"{told} and lose their beginning (data.long_prompts=cut_left).",
    )


def _cut_left(prompt: Prompt, limit: int, tokenizer: Tokenizer) -> Prompt:
    if len(prompt.token_ids) <= limit:
        return prompt
    ids = prompt.token_ids[-limit:]
    return replace(prompt, token_ids=ids, text=str(tokenizer.decode(ids)))


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


def _check_tokens(prompts: list[Prompt], tokenizer: Tokenizer) -> None:
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
