"""`quintet check` answers within seconds, whatever a recipe and the model it names hold: sound, or one message."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quintet.train.inputs  # noqa: F401  (what check imports once it has read a recipe is not what is timed)
from quintet.cli import main
from quintet.recipe.keys import leaf_keys
from quintet.recipe.time_limit import TimeUp, time_limit
from tests.models.directory import (
    DEEPSEEK_V3,
    QWEN3,
    QWEN3_MOE,
    shapes_of,
    write_model,
    write_tokenizer,
    write_weights,
)
from tests.patience import BUSY

RECIPE = "model: {build: {layers: 2}}\ndata: {task: addition, task_options: {digits: 1}}\n"
MOST_S = 3 * BUSY
MOST_MIB = 400

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{this}: &{this} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, this in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = {
    "aliases of aliases": (BOMB, "with its aliases written out, longer than"),
    "one long alias": (
        f"a: &a {'x' * 60_000}\nb: [*a, *a, *a]\n",
        "with its aliases written out, longer than",
    ),
    "flow levels": ("run: " + "[" * 3000 + "]" * 3000, "nested more than 32 levels deep"),
    "open levels": ("{a: " * 3000, "nested more than 32 levels deep"),
    "block levels": ("- " * 3000, "nested more than 32 levels deep"),
    "an alias in itself": ("a: &a [*a]\n", "contains itself"),
    "length": ("# remark\n" * 10_000, "longer than 65,536 characters"),
    "items": (f"rollout: {{stop_token_ids: [{'1,' * 1001}]}}", "1,001 values in one place"),
    "digits": (f"train: {{steps: {'9' * 5000}}}", "a number of 5000 characters"),
    "hexadecimal digits": (f"train: {{steps: 0x{'f' * 5000}}}", "a number of 5002 characters"),
    "a tag that lies": ("train: {steps: !!int 9e}", "'9e' is not what its YAML tag"),
    "half a character": (r'run: {name: "\ud800"}', "half of a surrogate pair"),
    "layers": ("model: {build: {layers: 1000000000000}}", "model.build.layers is 1000000000000; expected"),
    "head_dim": (f"model: {{build: {{head_dim: 1{'0' * 30}}}}}", "less|at most 4,096"),
    "unknown keys": ("\n".join(f"k{i}: 1" for i in range(900)), "and 880 more"),
    "patterns": (f"{RECIPE}lora: {{targets: ['{'[a-' * 9000}']}}", "at most 200 characters"),
    "a path": (f"{RECIPE}run: {{dir: {'x' * 9000}}}", "no file system takes such a path"),
    "a file's name": (f"model: {{build: {{}}, chat_template: {'x' * 9000}}}", "there is no file x"),
}


@pytest.fixture
def answer(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run `quintet check` on a text; the exit code and all it said, within its time."""

    def answer(text: str, *more: str) -> tuple[int, str]:
        file = tmp_path / "r.yaml"
        file.write_text(text)
        start = time.process_time()
        said = check(str(file), *more)
        assert time.process_time() - start < MOST_S
        return said

    return answer


@pytest.fixture
def nobody_looks_at_the_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep pytest from looking at an exception that a destructor lost: its hook is Python, and the limit ticks there too."""
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: None)


def check(*arguments: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["check", *arguments])  # a traceback would come out of here
    return code, err.getvalue()


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_refused_with_a_sentence(name: str, answer: Callable[..., tuple[int, str]]) -> None:
    text, wanted = TEXTS[name]
    code, said = answer(text)
    assert code == 2
    assert re.search(wanted, said), said
    assert len(said) < 10_000


def test_so_is_an_override(answer: Callable[..., tuple[int, str]]) -> None:
    for override, wanted in (
        ("train.steps=" + "9" * 5000, "a number of 5000 characters"),
        ("rollout.vllm=" + "[" * 3000 + "]" * 3000, "nested more than 32 levels deep"),
        (".".join("a" * 50_000) + "=1", "expected key=value with a dotted key"),
        ("rollout.vllm.x=" + "y" * 70_000, "longer than 65,536 characters"),
        ("run.dir=~nobody/" + "x" * 300, "no file system takes such a path"),
    ):
        code, said = answer(RECIPE, override)
        assert (code, wanted in said) == (2, True), said[:500]
        assert len(said) < 2000


@pytest.mark.parametrize("name", ["aliases of aliases", "flow levels", "digits", "layers"])
def test_the_process_stays_small(name: str, tmp_path: Path) -> None:
    """With all that starting takes: the command as it is typed."""
    file = tmp_path / "r.yaml"
    file.write_text(TEXTS[name][0])
    limited = f'ulimit -v {MOST_MIB << 10}; ulimit -t {MOST_S}; exec "$0" -m quintet check "$1"'
    done = subprocess.run(
        ["sh", "-c", limited, sys.executable, str(file)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert (done.returncode, done.stderr.startswith("error: ")) == (2, True), done.stderr


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**12}, "config.json: num_hidden_layers is 1000000000000; expected at most 1,024"),
    "mtp": (
        DEEPSEEK_V3 | {"num_nextn_predict_layers": 10**9},
        "config.json: num_nextn_predict_layers is 1000000000; expected at most 1,024",
    ),
    "experts": (QWEN3_MOE | {"num_experts": 10**6}, "layers of 1000000 experts are more than 65,536"),
    "heads": ({"head_dim": 10**30, "num_attention_heads": 8}, "config.json: head_dim is 1000.*; expected at most"),
    "a float": ({"rms_norm_eps": 10**400}, "config.json: rms_norm_eps is 1000"),
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = write_model(tmp_path / "model")
    (path / "tokenizer.json").touch()
    return path


def of(path: Path) -> str:
    return f"model: {{path: {path}}}\ndata: {{task: addition, task_options: {{digits: 1}}}}\n"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_with_absurd_sizes_is_named_with_its_key(name: str, model: Path, answer: Any) -> None:
    config, wanted = CONFIGS[name]
    (model / "config.json").write_text(json.dumps(QWEN3 | config))
    code, said = answer(of(model))
    assert (code, bool(re.search(wanted, said))) == (2, True), said


@pytest.mark.parametrize(
    ("file", "content", "wanted"),
    [
        ("config.json", b"{" + b" " * (9 << 20) + b"}", "config.json: larger than 8 MiB"),
        ("config.json", b'{"a":' * 5000, "config.json: nested too deeply"),
        ("config.json", b'{"vocab_size": ' + b"9" * 5000 + b"}", "thousands of digits"),
        ("model.safetensors.index.json", b"[" * 100_000, "index.json: nested too deeply"),
        (
            "model.safetensors.index.json",
            json.dumps({"weight_map": {"a": "x" * 300}}).encode(),
            "which is no name of a file",
        ),
        ("tokenizer_config.json", b'{"chat_template": ' + b"[" * 100_000, "tokenizer_config.json: nested too deeply"),
        ("chat_template.jinja", b"x" * (2 << 20), "chat_template.jinja: longer than 1,048,576 characters"),
    ],
)  # fmt: skip
def test_a_file_that_no_one_would_write_is_named(
    file: str, content: bytes, wanted: str, model: Path, answer: Any
) -> None:
    (model / file).write_bytes(content)
    code, said = answer(of(model))
    assert (code, wanted in said) == (2, True), said


def test_a_header_of_dims_without_end_is_named(model: Path, answer: Any) -> None:
    shape = ",".join(["9" * 4000] * 1000)
    text = f'{{"a": {{"dtype": "F32", "shape": [{shape}], "data_offsets": [0, 0]}}}}'.encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    code, said = answer(of(model))
    assert (code, "model.safetensors: not a sound safetensors file" in said) == (2, True), said
    assert len(said) < 1000


TEMPLATES = {
    "{{ 1 / 0 }}": "line 1: ZeroDivisionError: division by zero",
    "\n{% macro again() %}{{ again() }}{% endmacro %}\n{{ again() }}": "line 2: it calls itself without end",
    "{{ 'x' * 10**10 }}": "line 1: it takes more than 512 MiB of memory",
    "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}": "it makes more than 1,048,576 characters",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "it takes more than 1 s",
    "{% set s = namespace(x='x') %}{% for a in range(99) %}{% set s.x = s.x + s.x %}{% endfor %}": "takes more than",
    "{% for m in messages %}": "line 1: Unexpected end of template",
    "{{ messages.clear() }}": "line 1: access to attribute 'clear' of 'list' object is unsafe",
    "{{ ''.__class__.__mro__ }}": "line 1: access to attribute '__class__'",
    "{{" + "(" * 9000 + "1" + ")" * 9000 + "}}": "it calls itself without end",
    "{{ raise_exception('only for robots') }}": "line 1: only for robots",
}


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_chat_template_is_refused_with_its_place(
    template: str, tmp_path: Path, model: Path, answer: Any
) -> None:
    wanted = TEMPLATES[template]
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    code, said = answer(RECIPE, f"model.chat_template={file}")
    assert (code, f"model.chat_template={file}" in said, wanted in said) == (2, True, True), said
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    code, said = answer(of(model))
    assert (code, f"{model}/tokenizer_config.json" in said, wanted in said) == (2, True, True), said


def test_a_template_that_is_not_used_is_not_looked_at(answer: Any) -> None:
    code, _ = answer(RECIPE, "model.chat_template='{{ 1 / 0 }}'", "data.chat=false")
    assert code == 0


@pytest.fixture(scope="module")
def largest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much as DeepSeek-V3 has: 671 billion parameters in 46,000 tensors, of which only headers exist."""
    config = DEEPSEEK_V3 | {
        "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "vocab_size": 129280, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("largest")
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    shapes, files = list(shapes_of(config).items()), {}
    for start in range(0, len(shapes), 300):
        part, name = dict(shapes[start : start + 300]), f"model-{start:05}.safetensors"
        write_weights(path / name, part)
        files |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return path


@pytest.mark.parametrize(
    "more",
    [
        ["cluster.ranks=64", "layout.ep=64"],
        ["cluster.ranks=61", "layout.pp=61"],
        ["cluster.ranks=61", "layout.pp=61", "lora={rank: 8}"],
        ["optimizer.lr_multipliers={'*.experts.*': 2.0, '*': 1.0}"],
    ],
)
def test_the_largest_model_is_looked_through(largest: Path, more: list[str], answer: Any) -> None:
    code, said = answer(of(largest), "rollout.layout.tp=1", f"--time-limit-s={MOST_S}", *more)
    assert code == 0, said
    assert "Memory: about" in said
    assert "Not looked through" not in said


@pytest.mark.usefixtures("nobody_looks_at_the_lost")
def test_what_was_not_looked_through_in_time_is_said(answer: Any, largest: Path) -> None:
    code, said = answer(of(largest), "rollout.layout.tp=1", "--time-limit-s=0.2")
    assert code == 2
    assert re.search(
        r"0\.2 s of processor time did not suffice to look through \d+ of its rules, from this on: ", said
    )
    hard = ["data.task=countdown", "reward.function=countdown"]
    options = "data.task_options={numbers: 8, max_number: 999, max_target: 999}"
    code, said = answer(RECIPE, *hard, options, "--time-limit-s=1")
    assert code == 0
    assert (
        "Not looked through in 1 s of processor time: train problems of the task countdown, eval problems"
        in said
    )


@pytest.mark.parametrize("limit", ["0", "-1", "inf", "nan", "1e30"])
def test_a_time_limit_that_is_none_is_refused(answer: Any, limit: str) -> None:
    with pytest.raises(SystemExit):
        answer(RECIPE, f"--time-limit-s={limit}")


@pytest.mark.usefixtures("nobody_looks_at_the_lost")
def test_a_limit_that_is_lost_in_a_destructor_comes_again() -> None:
    class Loses:
        def __del__(self) -> None:
            spin(0.3)

    def spin(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def lose() -> None:
        with time_limit(0.1):
            Loses()
            spin(1.0)

    with pytest.raises(TimeUp):
        lose()


def test_a_users_own_code_takes_its_time(tmp_path: Path, answer: Any) -> None:
    code = tmp_path / "family.py"
    code.write_text(
        "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass\n1 / 0\n"
    )
    ended, said = answer(RECIPE, f"model.family={code}:Mine", "--time-limit-s=1")
    assert ended == 2
    assert "ZeroDivisionError" in said
    assert "processor time" not in said


_nasty = st.one_of(
    st.sampled_from(
        [
            0, -1, 1, 2**31, 2**63, 10**30, 1e308, float("inf"), float("nan"), None, True, "", "x" * 5000, "~no/x", "a\0b", "/dev/zero",
            "/proc/self/mem", "..", "auto", "x.py:f", ":", "é" * 300 + ".py:f", "[", "{{ 1 / 0 }}", "*" * 100, [], {}, [[]], {"": ""},
            {"a.b": 1}, ["*"] * 50, "\x85", "<<", "os:system", "quintet.cli:main", "\U0001f600",
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda one: st.lists(one, max_size=3), max_leaves=8),
)  # fmt: skip
_keys = sorted(leaf_keys())
# Commands that write or reach out have no business in a fuzz test, and neither has a model that exists.
_recipes = st.dictionaries(st.sampled_from(_keys), _nasty, max_size=4)
_soup = st.lists(
    st.sampled_from(
        ["a", ": ", "- ", "[", "]", "{", "}", ", ", "\n", "  ", "&a ", "*a", "? ", "! ", "!!int ", "!!set ", "|", ">", "'", '"', "#", "%",
         "---", "...", "1e9", "0x", "0o9", "~", "<<: ", "model: ", "data: ", "\t", "\\", "\ufeff", "@", "`", "9" * 99],
    ),
    max_size=40,
).map("".join)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of fuzzed recipes."""
    path = tmp_path_factory.mktemp("fuzz")
    with contextlib.chdir(path):
        yield path


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(values=_recipes)
def test_any_value_is_answered(folder: Path, values: dict[str, Any]) -> None:
    text = {"model": {"build": {"layers": 2}}, "data": {"task": "addition", "task_options": {"digits": 1}}}
    (folder / "r.yaml").write_text(json.dumps(text))
    start = time.process_time()
    arguments = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    code, said = check("r.yaml", *arguments)
    assert code in (0, 2)
    assert time.process_time() - start < MOST_S, arguments
    assert len(said) < 20_000


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(text=st.one_of(_soup, st.text(max_size=200)))
def test_any_text_is_answered(folder: Path, text: str) -> None:
    (folder / "r.yaml").write_text(text, errors="surrogatepass", newline="")
    start = time.process_time()
    code, _ = check("r.yaml")
    assert code == 2
    assert time.process_time() - start < MOST_S
