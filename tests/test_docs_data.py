"""docs/data.md: every example row is read as the page says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from quintet.data.prompts import EVAL_PROBLEMS, TRAIN_PROBLEMS, alphabet_of, load_prompts
from quintet.data.tasks import TASKS, make_task
from quintet.data.tokenizer import build_char_tokenizer, load_tokenizer
from quintet.recipe.schema import Data

PAGE = (Path(__file__).parents[1] / "docs" / "data.md").read_text()


def block(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    build_char_tokenizer(alphabet_of(Data()), tmp_path / "tokenizer")
    return tmp_path


def test_every_kind_of_file_is_read(place: Path) -> None:
    plain, worked = block("jsonl")
    (table,) = block("csv")
    (place / "rows.jsonl").write_text(plain)
    (place / "rows.csv").write_text(table)
    (place / "gsm8k.jsonl").write_text(worked)
    exec(block("python")[0], {})
    tokenizer = load_tokenizer(place / "tokenizer")
    for name in ("rows.jsonl", "rows.csv", "rows.parquet", "rows"):
        first, *_ = load_prompts(
            Data(train_path=name), "train", tokenizer, seed=0, needs=("answer", "response")
        )
        assert first.text.startswith("What is 12 + 30"), name
        assert (first.answer, first.response) == ("42", "12 + 30 = 42")
    _, chat = load_prompts(Data(train_path="rows.jsonl"), "train", tokenizer, seed=0)
    assert chat.text == "Be brief.What is 2 + 2?"
    (row,) = load_prompts(Data(task="gsm8k", train_path="gsm8k.jsonl"), "train", tokenizer, seed=0)
    (suffix,) = re.findall(r"below it a line: `(.*?)`", PAGE)
    assert row.text == f"Tom has 12 apples and buys 30. How many are there?\n{suffix}"
    assert row.answer == "42"
    assert "12 + 30 = 42" in (row.response or "")


def test_the_built_tokenizer_is_as_told(place: Path) -> None:
    tokenizer = load_tokenizer(place / "tokenizer")
    (template,) = block("jinja")
    assert tokenizer.chat_template == template.strip()
    (told,) = re.findall(r"`(<\w+>)` is 0, `(<\w+>)` 1, `(<\w+>)` 2", PAGE)
    assert tuple(tokenizer.convert_ids_to_tokens([0, 1, 2])) == told
    assert tokenizer.convert_tokens_to_ids(min(alphabet_of(Data()))) == 3


@pytest.mark.parametrize("name", TASKS)
def test_the_tasks_are_as_told(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}`")]
    _, _, example, options, _ = (cell.strip() for cell in row.split("|"))
    told = {key: int(value) for key, value in re.findall(r"`(\w+)` (\d+)", options)}
    assert told == {field.name: field.default for field in fields(TASKS[name])}  # type: ignore[arg-type]
    prompt, response = re.findall(r"`(.*?)`", example)
    task = make_task(name, {})
    answer = f"{prompt.rstrip('=')}" if name == "countdown" else response
    assert task.verify(prompt, response, answer)["reward"] == 1
    assert f"{TRAIN_PROBLEMS:,} training and {EVAL_PROBLEMS:,} held-out" in PAGE
