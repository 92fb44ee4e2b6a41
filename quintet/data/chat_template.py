"""Chat templates: where they stand, and rendering by them in a process of limited time and memory.

They are programs in the files of a model that may come from anyone. Jinja's sandbox does not bound them:
`{{ 'x' * 10**10 }}` is one operation.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quintet.errors import UserError, reading
from quintet.models.hf_config import read_json
from quintet.recipe.paths import is_file
from quintet.recipe.schema import Data, Model

KEY = "model.chat_template"
PROCESSOR_S = 1.0
"""For one conversation; the largest templates take milliseconds."""

_MOST_CHARACTERS = 1 << 20
_CONFIG = "tokenizer_config.json"


class ChatTemplate(NamedTuple):
    text: str
    where: str
    """Where it stands, for messages: `model.chat_template`, or a file."""


class TemplateFailure(Exception):
    """A template cannot render a conversation: its number among those asked for, and why, with place and line."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


def given_template(text: str) -> ChatTemplate:
    """Return the template that model.chat_template names: Jinja text, or a file with it.

    Raises UserError when it is neither.
    """
    if "{" in text:
        return ChatTemplate(text, KEY)
    if not is_file(text):
        raise UserError(f"{KEY} is neither Jinja text nor a file: {text:.200}")
    return ChatTemplate(_read(Path(text).expanduser()), f"{KEY}={text}")


def own_template(directory: Path) -> ChatTemplate | None:
    """Return the template in a tokenizer's directory, where transformers looks for it; None where there is none.

    Raises UserError for a file that cannot be read.
    """
    if (file := directory / "chat_template.jinja").is_file():
        return ChatTemplate(_read(file), str(file))
    found = read_json(file).get("chat_template") if (file := directory / _CONFIG).is_file() else None
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return ChatTemplate(found, str(file)) if isinstance(found, str) else None


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the variables that a tokenizer's files give to its template: bos_token, eos_token, …

    Raises UserError for a file that cannot be read.
    """
    found: dict[str, str] = {}
    for file in (directory / "special_tokens_map.json", directory / _CONFIG):
        for name, token in read_json(file).items() if file.is_file() else ():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def render(
    template: ChatTemplate, conversations: Sequence[Sequence[Any]], variables: Mapping[str, Any]
) -> list[str]:
    """Return the texts of conversations, each with the beginning of an assistant's answer.

    conversations: lists of messages. variables: what the template knows besides, such as special tokens.
    Raises TemplateFailure for the first conversation that it cannot render, or takes too much time or memory for.
    """
    head = {"template": template.text, "variables": dict(variables), "processor_s": PROCESSOR_S}
    lines = "\n".join(json.dumps(one) for one in (head, *conversations))
    # -P: no module of this package, or of the working directory, stands before the standard library's.
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("template_worker.py"))],
        input=lines.encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    texts = [json.loads(line) for line in done.stdout.splitlines() if line]
    if texts and isinstance(failed := texts[-1], dict):
        line = f", line {failed['line']}" if failed["line"] else ""
        raise TemplateFailure(len(texts) - 1, f"{template.where}{line}: {failed['error']}")
    if len(texts) < len(conversations):
        why = f"it takes more than {PROCESSOR_S:g} s"
        if done.returncode != -signal.SIGPROF:
            why = f"the process that renders it ended with code {done.returncode}"
        raise TemplateFailure(len(texts), f"{template.where}: {why}")
    return texts


def check_template(model: Model, data: Data) -> None:
    """Render the shortest conversation, as a run renders every prompt; the template of a model that is built is known.

    Raises UserError where a run would not come to its first prompt.
    """
    if not data.chat:
        return
    directory, given = model.directory, model.chat_template
    own = own_template(directory) if given is None and directory is not None else None
    template = own if given is None else given_template(given)
    if template is None:  # a directory without one: only its tokenizer can tell
        return
    tokens = special_tokens(directory) if directory is not None else {}
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt is not None else []
    try:
        render(template, [[*system, {"role": "user", "content": "1+1="}]], tokens)
    except TemplateFailure as failed:
        raise UserError(f"the chat template cannot render a prompt: {failed}") from None


def _read(file: Path) -> str:
    try:
        with reading(file), file.open(encoding="utf-8") as f:
            text = f.read(_MOST_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text; expected a Jinja template") from None
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"{file}: longer than {_MOST_CHARACTERS:,} characters, which no chat template is")
    return text
