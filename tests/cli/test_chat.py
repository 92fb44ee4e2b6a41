"""`quintet chat`: what a conversation is made of."""

from __future__ import annotations

import io
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import main
from quintet.data.tokenizer import build_char_tokenizer
from quintet.engine.weights.random_model import write_fresh_model
from quintet.errors import UserError
from quintet.recipe.loader import load_recipe
from quintet.recipe.schema import BuildModel, Recipe
from quintet.train import generate
from tests.data.byte_tokenizer import byte_tokenizer
from tests.models.directory import write_model


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The recipe, and each conversation that was to be answered."""
    heard: list[Any] = []

    def answer(conversation: list[dict[str, str]], tell: Callable[[str], None]) -> str:
        heard.append(conversation)
        if "long" in conversation[-1]["content"]:
            raise UserError("the prompt has 2000 tokens")
        said = conversation[-1]["content"].upper()
        tell(said[:2])
        tell(said[2:])
        return said

    @contextmanager
    def answering(recipe: Recipe) -> Iterator[Any]:
        heard.append(recipe)
        yield answer

    monkeypatch.setattr("quintet.train.generate.answering", answering)
    return heard


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = write_model(tmp_path / "model")
    (path / "tokenizer.json").touch()
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_conversation_is_kept(
    heard: list[Any], model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "hello\n\n  so long \nwell\n/rest\n/reset\n/etc/hosts is what?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    assert main(["chat", model, "rollout.temperature=0", "--system", 'Be "brief"', "run.seed=4"]) == 0
    recipe, *conversations = heard
    assert (recipe.rollout.temperature, recipe.run.seed, recipe.data.system_prompt) == (0, 4, 'Be "brief"')
    first = [user("hello"), {"role": "assistant", "content": "HELLO"}]
    assert conversations == [
        [user("hello")],
        [*first, user("so long")],
        [*first, user("well")],  # without what could not be answered
        [user("/etc/hosts is what?")],
    ]
    told = capsys.readouterr()
    assert told.out == "HELLO\nWELL\n/ETC/HOSTS IS WHAT?\n"
    assert "error: the prompt has 2000 tokens" in told.err
    assert "there is no /rest;" in told.err


@pytest.mark.slow
def test_a_real_model_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = build_char_tokenizer(string.ascii_letters, tmp_path / "model")
    ends = {"eos_id": tokenizer.eos_token_id, "pad_id": tokenizer.pad_token_id}
    build = BuildModel(layers=2, hidden_size=64, ffn_hidden_size=128)
    write_fresh_model(build, tmp_path / "model", vocab_size=len(tokenizer), seed=1, **ends)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hello\n{'x' * 1500}\n{'x' * 4096}\n\xfc\n/reset\nhello\n"))
    given = ["rollout.max_response_tokens=8", "rollout.temperature=0", "cluster.device=cpu"]
    assert main(["chat", str(tmp_path / "model"), *given]) == 0
    told = capsys.readouterr()
    answers = told.out.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2]
    assert "prompt 1: the prompt has 56" in told.err
    assert "more than data.max_prompt_tokens=4088" in told.err
    assert "does not know some characters" in told.err


def test_a_real_model_is_heard_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    build = BuildModel(layers=2, hidden_size=64, ffn_hidden_size=128)
    write_fresh_model(build, tmp_path / "model", vocab_size=len(tokenizer), seed=1, eos_id=0, pad_id=1)
    given = [f"model.path={tmp_path / 'model'}", "rollout.max_response_tokens=24", "rollout.stop=[xyz]"]
    recipe = load_recipe(None, [*given, "cluster={ranks: 1, device: cpu}"], command="generate")
    seen: list[int] = []  # tokens there were when a piece was told
    drawn = generate.TextPieces.add
    monkeypatch.setattr(
        generate.TextPieces, "add", lambda pieces, ids: (seen.append(len(ids)), drawn(pieces, ids))
    )
    pieces: list[tuple[int, str]] = []
    with generate.answering(recipe) as answer:
        for _ in range(2):
            seen.clear()
            pieces.clear()
            said = answer([user("né€😀")], lambda piece: pieces.append((seen[-1], piece)))
            assert "".join(piece for _, piece in pieces) == said
            assert seen == list(range(1, 25))
            assert len({count for count, _ in pieces}) > 5  # and not all of it when the last token was there


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_what_is_missing_is_named_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat"])
    assert capsys.readouterr().err.endswith("required: CHECKPOINT\n")
