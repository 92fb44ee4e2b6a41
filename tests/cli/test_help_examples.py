"""The examples in `--help` run as they are printed, from the directory that they speak of, up to where processes would start."""

from __future__ import annotations

import io
import shlex
import shutil
import string
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from quintet.cli import COMMANDS, main
from quintet.data.tokenizer import build_char_tokenizer
from tests.models.directory import QWEN3, write_model

pytestmark = pytest.mark.usefixtures("templates_rendered_once")

ROOT = Path(__file__).parents[2]
RECIPE = """\
model: {path: model}
data: {train_path: train.jsonl, eval_path: test.jsonl}
rollout: {max_response_tokens: 64}
engine: {tokens_per_microbatch_per_rank: 4096}
sft: {}
"""
EXAMPLES = [
    (name, line.strip()) for name, command in COMMANDS.items() for line in command.examples.splitlines()
]
STOOD_IN = {
    "quintet.train.ppo": "train",
    "quintet.train.sft": "sft",
    "quintet.train.generate": "generate evaluate",
}
"""What starts processes."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the examples speak of."""
    path = tmp_path_factory.mktemp("examples")
    (path / "recipes").symlink_to(ROOT / "recipes")
    (path / "my.yaml").write_text(RECIPE)
    for name in ("train", "test", "conversations", "questions"):
        (path / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "response": "2"}\n')
    for name in ("gsm8k_train", "gsm8k_test"):
        (path / f"{name}.jsonl").write_text('{"question": "1+1?", "answer": "#### 2", "prompt": "1+1?"}\n')
    (path / "questions.txt").write_text("1+1=\n")
    for name in ("model", "Qwen2.5-0.5B-Instruct", "runs/demo-20261121-100000/checkpoint"):
        tokenizer = build_char_tokenizer(string.printable, path / name)
        write_model(path / name, QWEN3 | {"vocab_size": len(tokenizer), "num_key_value_heads": 8})
    return path


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_runs_as_printed(
    place: Path, tmp_path: Path, name: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line.partition(">")[0], comments=True)
    assert words[:2] == ["quintet", name]
    if name == "verify-resume" or not COMMANDS[name].of_recipe:
        assert COMMANDS[name].parse(words[2:])
        return
    ran: list[str] = []
    for module, functions in STOOD_IN.items():
        stand_in = types.ModuleType(module)
        for function in functions.split():
            stand_in.__dict__[function] = _recorder(ran)
        monkeypatch.setitem(sys.modules, module, stand_in)
    stand_in.__dict__["answering"] = lambda recipe: nullcontext(_recorder(ran)(recipe))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    shutil.copytree(place, tmp_path / "there", symlinks=True)
    monkeypatch.chdir(tmp_path / "there")
    assert main(words[1:]) == 0
    assert len(ran) == (name not in ("check", "plan"))


def _recorder(ran: list[str]) -> Callable[..., dict[str, float] | list[dict[str, str]] | None]:
    def record(recipe, given: object = None):
        """As `train` and `sft`, `generate` with its prompts, or `evaluate` with where its samples go."""
        ran.append(recipe.run.name)
        return [{"prompt": one} for one in given] if isinstance(given, list) else {"accuracy": 1.0}

    return record
