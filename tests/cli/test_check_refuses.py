"""What `quintet train` refuses before it starts anything, `quintet check` refuses with the same words: it is one function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quintet.cli import main
from quintet.errors import UserError
from quintet.recipe.loader import load_recipe
from quintet.train.inputs import prepare
from tests.models.directory import QWEN3, write_model, write_tokenizer

pytestmark = pytest.mark.usefixtures("templates_rendered_once")

RECIPE = """\
model: {path: model}
data: {train_path: train.jsonl, eval_path: test.jsonl, max_prompt_tokens: 16}
rollout: {max_response_tokens: 8}
train: {prompts_per_step: 1}
reward: {function: exact_match}
""".replace("", "")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a recipe that is sound, and what it names."""
    write_tokenizer(tmp_path / "model")
    write_model(tmp_path / "model", QWEN3 | {"vocab_size": 110})
    (tmp_path / "r.yaml").write_text(RECIPE)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _edit(file: str, **changes: object) -> Callable[[Path], None]:
    def edit(place: Path) -> None:
        content = json.loads((place / file).read_text())
        for key, value in changes.items():
            content.pop(key, None)
            if value is not None:
                content[key] = value
        (place / file).write_text(json.dumps(content))

    return edit


def _without_template(place: Path) -> None:
    _edit("model/tokenizer_config.json", chat_template=None)(place)
    (place / "model" / "chat_template.jinja").unlink(missing_ok=True)


def _nothing(place: Path) -> None:
    pass


BROKEN: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "a prompt too long": (
        lambda place: (place / "train.jsonl").write_text('{"prompt": "1+1+1+1+1+1+1+1+1=", "answer": "9"}\n'),
        [],
        "train.jsonl:1: the prompt has 18 tokens, more than data.max_prompt_tokens=16",
    ),
    "a held-out prompt too long": (
        lambda place: (place / "test.jsonl").write_text('{"prompt": "1+1+1+1+1+1+1+1+1=", "answer": "9"}\n'),
        [],
        "test.jsonl:1: the prompt has 18 tokens",
    ),
    "no chat template": (_without_template, [], "the tokenizer has no chat template; set model.chat_template"),
    "no end of sequence": (
        _edit("model/tokenizer_config.json", eos_token=None),
        [],
        "has no end-of-sequence token, so no response would ever end",
    ),
    "no tokenizer": (
        lambda place: (place / "model" / "tokenizer.json").write_text("{}"),
        [],
        "model.path: no tokenizer could be read from model",
    ),
    "run.dir": (_nothing, ["run.dir=r.yaml"], "run.dir: no directory can be made in"),
    "run.dir below what takes none": (_nothing, ["run.dir=/proc/runs"], "run.dir: no directory can be made in /proc"),
    "no reward module": (_nothing, ["reward.function=nowhere.such:f"], "reward.function: there is no module 'nowhere"),
    "a reward that does not import": (
        lambda place: (place / "mine.py").write_text("import nothing_of_that_name\n"),
        ["reward.function=mine.py:reward"],
        "No module named 'nothing_of_that_name'",
    ),
    "no such function": (
        lambda place: (place / "mine.py").write_text("def rewards(): ...\n"),
        ["reward.function=mine.py:reward"],
        "mine.py",
    ),
    "a stop that is never found": (_nothing, ["rollout.stop=['<eos>']"], "rollout.stop: '<eos>' would never be found"),
    "an answer column": (_nothing, ["data.eval_answer_key=gold"], "no column 'gold'"),
    "characters the tokenizer lacks": (
        lambda place: (place / "train.jsonl").write_text('{"prompt": "é=", "answer": "2"}\n'),
        [],
        "the tokenizer does not know some characters of 'é='",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_check_refuses_what_train_refuses(place: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, overrides, said = BROKEN[name]
    assert main(["check", "r.yaml"]) == 0, capsys.readouterr().err
    damage(place)
    capsys.readouterr()
    assert main(["check", "r.yaml", *overrides]) == 2
    told = capsys.readouterr().err.removeprefix("error: ").rstrip("\n")
    assert said in told
    with pytest.raises(UserError) as refused:
        prepare(load_recipe("r.yaml", overrides), "train", place / "scratch")
    assert str(refused.value).splitlines()[0] == told.splitlines()[0]
    assert not (place / "runs").exists()


def test_check_tells_what_a_run_tells(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "train.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "111111111111111111=", "answer": "3"}\n'
    )
    told = ["data.long_prompts=drop", "train.prompts_per_step=2", "optimizer.warmup_steps=9", "train.steps=3"]
    assert main(["check", "r.yaml", *told]) == 0
    said = capsys.readouterr().err
    notes = prepare(load_recipe("r.yaml", told), "train", place / "scratch").notes
    assert len(notes) == 4
    assert all(note in said for note in notes)
    assert "Data: 1 train prompts in train.jsonl." in said
    assert (
        "1 of 2 prompts in train.jsonl have more than data.max_prompt_tokens=16 tokens and are left out"
        in said
    )
    assert (
        "train.jsonl has 1 prompt and train.prompts_per_step is 2: each step takes some more than once."
        in said
    )
    assert "optimizer.warmup_steps=9 is more than the 3 optimizer steps there are; shortened to 3." in said


def test_sft_on_a_file_of_its_own_needs_no_other(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "worked.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    own = ["data.train_path=null", "data.sft_path=worked.jsonl", "sft={samples_per_step: 1}"]
    assert main(["check", "r.yaml", *own, "--command", "sft"]) == 0
    assert "Data: 1 sft prompts in worked.jsonl." in capsys.readouterr().err
    own[0] = "train.steps=1"
    assert main(["check", "r.yaml", *own]) == 0  # the training prompts have no responses, and need none
    inputs = prepare(load_recipe("r.yaml", own), "train", place / "scratch")
    assert inputs.sft is not None
    assert inputs.train is not None
    assert [p.response for p in inputs.sft] == ["2"]
    assert [p.response for p in inputs.train] == [None]
    assert main(["check", "r.yaml", "data.sft_path=worked.jsonl"]) == 2
    assert "data.sft_path is not read without a section sft" in capsys.readouterr().err
