"""Chat templates are rendered as transformers renders them, and one that cannot be is refused with prompt, place and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.data.chat_template import ChatTemplate, TemplateFailure, own_template, render, special_tokens
from quintet.data.prompts import load_prompts
from quintet.data.tokenizer import build_char_tokenizer, load_tokenizer
from quintet.errors import UserError
from quintet.recipe.schema import Data, Model

TALKS = [
    [{"role": "user", "content": "hi <b>é</b>\n"}],
    [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "c 'q' \"d\""},
    ],
]
TEMPLATES = [
    "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}{{ bos_token }}{{ nothing }}",
    # as Qwen's: namespaces, reversed slices, tests, white space control
    """{%- set ns = namespace(last=-1) %}
    {%- for m in messages[::-1] %}
        {%- if ns.last < 0 and m.role == "user" and m.content is string %}{%- set ns.last = loop.index0 %}{%- endif %}
    {%- endfor %}
    {%- for m in messages %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endfor %}
    {%- if tools is none and not documents %}{{- "no tools" }}{%- endif %}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}
    {%- if add_generation_prompt %}
        {{- '<|im_start|>assistant\\n' }}{{ ns.last }}
    {%- endif %}""",
    # tojson leaves HTML alone, blocks are trimmed, loops can be left, and what an assistant said is marked
    """
    {% for m in messages %}
        {% if loop.index > 3 %}{% break %}{% endif %}
    {{ m | tojson }}{{ m | tojson(indent=2, sort_keys=true) }}
        {% generation %}
    [{{ m.content }}]
        {% endgeneration %}
    {% endfor %}
    {% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(strftime_now("%Y")) }}
    """,
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer("".join(map(chr, range(32, 127))) + "\né", path)
    return path


@pytest.mark.parametrize("template", TEMPLATES, ids=["plain", "qwen", "extensions"])
def test_texts_are_those_of_transformers(directory: Path, template: str) -> None:
    tokenizer = load_tokenizer(directory, Model(chat_template=template))
    wanted = [
        tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in TALKS
    ]
    assert render(ChatTemplate(template, ""), TALKS, tokenizer.special_tokens_map) == wanted


def test_an_own_template_and_its_tokens_are_found_as_transformers_finds_them(
    directory: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(directory)
    found = own_template(directory)
    assert found is not None
    assert found.text == tokenizer.get_chat_template()
    assert special_tokens(directory).items() >= tokenizer.special_tokens_map.items()
    assert own_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": "{{ 2 }}"}]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": named, "bos_token": {"content": "<s>"}})
    )
    assert own_template(tmp_path) == ChatTemplate("{{ 2 }}", str(tmp_path / "tokenizer_config.json"))
    assert special_tokens(tmp_path) == {"bos_token": "<s>"}


def test_the_conversation_that_fails_is_told_and_those_before_it_cost_nothing() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n{{ 1 / (m.content | int) }}{% if m.content == '7' %}"
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}",
        "here",
    )

    def failing(*contents: str) -> tuple[int, str]:
        with pytest.raises(TemplateFailure) as caught:
            render(template, [[{"role": "user", "content": one}] for one in contents], {})
        return caught.value.number, str(caught.value)

    assert failing("1", "2", "0", "7") == (2, "here, line 2: ZeroDivisionError: division by zero")
    assert failing("1", "7", "0") == (1, "here: it takes more than 1 s")


@pytest.mark.parametrize("given", [None, "{{ 1 /\n 0 }}"])
def test_a_prompt_that_a_run_cannot_render_is_named_with_the_place_of_the_template(
    directory: Path, tmp_path: Path, given: str | None
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": ""}\n')
    tokenizer: Any = load_tokenizer(directory, Model(chat_template=given))
    place = r"model\.chat_template, line 1"
    if given is None:
        file = own_template(directory)
        assert file is not None
        Path(tmp_path / "chat_template.jinja").write_text("\n{{ 1 / 0 }}")
        for name in directory.glob("*.json"):
            (tmp_path / name.name).write_bytes(name.read_bytes())
        tokenizer, place = load_tokenizer(tmp_path), r"chat_template\.jinja, line 2"
    with pytest.raises(
        UserError,
        match=rf"rows\.jsonl:1: the chat template cannot render this prompt: .*{place}: ZeroDivisionError",
    ):
        load_prompts(Data(train_path=str(rows)), "train", tokenizer, seed=0)


def prompts_with(tokenizer: Any, folder: Path) -> Any:
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": ""}\n')
    return load_prompts(Data(train_path=str(rows)), "train", tokenizer, seed=0)


def test_a_tokenizers_own_way_of_rendering_is_taken(directory: Path, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(directory)

    class Own(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, **_: Any) -> str:
            return f"[{conversation[0]['content']}]"

    tokenizer.__class__ = Own
    assert prompts_with(tokenizer, tmp_path)[0].text == "[a]"
    tokenizer.chat_template = None  # as of models whose code writes conversations
    assert prompts_with(tokenizer, tmp_path)[0].text == "[a]"
    Own.apply_chat_template = lambda self, conversation, **_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the tokenizer's own code cannot render"):
        prompts_with(tokenizer, tmp_path)


def test_templates_of_which_none_is_the_default_end_in_a_sentence(directory: Path, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(directory)
    tokenizer.chat_template = {"one": "{{ 1 }}", "two": "{{ 2 }}"}
    with pytest.raises(
        UserError, match=r"does not say how to write conversations .*give model\.chat_template"
    ):
        prompts_with(tokenizer, tmp_path)
