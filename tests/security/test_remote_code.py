"""A model directory that brings code: it runs when the recipe says so, and else nobody is even asked."""

from __future__ import annotations

import ast
import json
import os
import pty
import string
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.data.tokenizer import build_char_tokenizer, load_tokenizer
from quintet.engine.weights.random_model import write_fresh_model
from quintet.errors import UserError
from quintet.recipe.schema import BuildModel, Model
from quintet.rollout.vllm import compat
from tests.patience import BUSY

ROOT = Path(__file__).parents[2]
CODE = """\
import os
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

open(os.environ["TRACE"], "a").write(f"{os.getpid()}\\n")


class Config(PreTrainedConfig):
    model_type = "odd"


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
OVERRIDES = [
    *("model.build=null", "sft=null", "train.steps=1", "train.prompts_per_step=2", "train.eval_prompts=2"),
    *(
        "rollout.samples_per_prompt=2",
        "rollout.max_response_tokens=4",
        "cluster.device=cpu",
        "cluster.ranks=1",
    ),
    *("train.eval_samples_per_prompt=1", "optimizer.warmup_steps=0"),
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose tokenizer is a class that only its own directory has."""
    path = tmp_path / "model"
    tokenizer = build_char_tokenizer(string.printable, path)
    build = BuildModel(layers=1, hidden_size=32, ffn_hidden_size=32, heads=2, kv_heads=1, head_dim=16)
    write_fresh_model(build, path, vocab_size=len(tokenizer), eos_id=1, pad_id=0, seed=0)
    file = path / "tokenizer_config.json"
    named = {"tokenizer_class": "OddTokenizer", "auto_map": {"AutoTokenizer": [None, "odd.Tokenizer"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    config = path / "config.json"
    named = {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Config"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | named))
    (path / "odd.py").write_text(CODE)
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # where transformers copies the code to
    return path


def quintet(command: str, model: Path, *words: str, stdin: int = subprocess.DEVNULL) -> tuple[int, str]:
    """The exit code of a command with this model, and all that it said."""
    recipe = str(ROOT / "recipes" / "laptop_demo.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "quintet", command, recipe, f"model.path={model}", *OVERRIDES, *words],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=model.parent,
        timeout=60 * BUSY,
        check=False,
    )
    return done.returncode, done.stdout.decode()


@pytest.mark.parametrize(
    ("command", "terminal"),
    [
        pytest.param("check", True, marks=pytest.mark.slow),
        pytest.param("train", False, marks=pytest.mark.slow),
        ("generate", True),
    ],
)
def test_nothing_runs_and_nobody_is_asked(model: Path, command: str, terminal: bool) -> None:
    words = ["--prompt", "1+1="] if command == "generate" else []
    user, machine = pty.openpty()
    try:
        os.write(user, b"y\n")  # who is asked would answer
        code, said = quintet(command, model, *words, stdin=machine if terminal else subprocess.DEVNULL)
    finally:
        os.close(user)
        os.close(machine)
    assert code == 2, said
    assert "auto_map in tokenizer_config.json names odd.Tokenizer" in said
    assert "set model.trust_remote_code=true" in said
    assert "[y/N]" not in said
    assert not (model.parent / "trace").exists()
    assert not (model.parent / "runs").exists()


@pytest.mark.slow
def test_who_trusts_it_is_warned_and_served(model: Path) -> None:
    trusted = "model.trust_remote_code=true"
    code, said = quintet("check", model, trusted)
    assert code == 0, said
    assert f"warning: model.trust_remote_code=true: code that comes with {model}" in said
    assert not (model.parent / "trace").exists(), "check starts nothing"
    code, said = quintet("train", model, trusted)
    assert code == 0, said
    assert said.index("warning: model.trust_remote_code=true") < said.index("run directory")
    processes = (model.parent / "trace").read_text().split()
    assert len(set(processes)) == 2, "the controller and the rank"
    (run,) = (model.parent / "runs").iterdir()
    assert load_tokenizer(run / "checkpoint", Model(trust_remote_code=True)).eos_token_id == 1


def test_code_that_is_not_needed_does_not_run(model: Path) -> None:
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert load_tokenizer(model).eos_token_id == 1
    assert not (model.parent / "trace").exists()


@pytest.mark.vllm
def test_vllm_runs_nothing_either(model: Path) -> None:
    compat.prepare("cpu")
    from vllm.engine.arg_utils import EngineArgs

    said = r"auto_map in config\.json.*set model\.trust_remote_code=true"
    with pytest.raises(UserError, match=said), compat.starting():
        EngineArgs(model=str(model), trust_remote_code=False, dtype="float32").create_engine_config()
    assert not (model.parent / "trace").exists()


def test_every_call_says_whether_it_trusts() -> None:
    files = [
        f for room in ("quintet", "benchmarks", "examples", "tools") for f in (ROOT / room).rglob("*.py")
    ]
    calls = [
        (file, call)
        for file in files
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config", "pipeline")
    ]
    silent = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file, call in calls
        if "trust_remote_code" not in [keyword.arg for keyword in call.keywords]
    ]
    assert calls
    assert not silent
