"""Character tokenizers survive saving and decode to what was encoded; bad directories are explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quintet.data.tokenizer import _PLAIN, build_char_tokenizer, check_stops, load_tokenizer
from quintet.errors import UserError
from quintet.recipe.schema import Model

ALPHABET = "0123456789+= \n\tabc(é’中"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    directory = tmp_path_factory.mktemp("tokenizer")
    return [build_char_tokenizer(ALPHABET, directory), load_tokenizer(directory)]


@given(text=st.text(alphabet=ALPHABET))
def test_round_trip(tokenizers: list[object], text: str) -> None:
    for tokenizer in tokenizers:
        ids = tokenizer(text)["input_ids"]  # type: ignore[operator]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text  # type: ignore[attr-defined]
        assert tokenizer.decode([*ids, 1, 0], skip_special_tokens=True) == text  # type: ignore[attr-defined]


def test_ids_do_not_depend_on_the_order_of_the_alphabet(tmp_path: Path) -> None:
    a, b = (build_char_tokenizer(text, tmp_path / text[:1]) for text in ("abc1", "1cbaa"))
    assert (
        a.get_vocab() == b.get_vocab() == {"<pad>": 0, "<eos>": 1, "<unk>": 2, "1": 3, "a": 4, "b": 5, "c": 6}
    )
    assert (a.pad_token_id, a.eos_token_id, a("?")["input_ids"]) == (0, 1, [2])


def test_chat_template(tokenizers: list[object]) -> None:
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    for tokenizer in tokenizers:
        render = tokenizer.apply_chat_template  # type: ignore[attr-defined]
        assert render(turns[:1], tokenize=False, add_generation_prompt=True) == "1+1="
        assert render(turns, tokenize=False) == "1+1=2<eos>"


def test_template_override(tmp_path: Path) -> None:
    build_char_tokenizer("ab", tmp_path / "t")
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}!")
    file = Model(chat_template=str(tmp_path / "template.jinja"))
    assert load_tokenizer(tmp_path / "t", Model(chat_template="{{ x }}")).chat_template == "{{ x }}"
    assert load_tokenizer(tmp_path / "t", file).chat_template.endswith("!")
    with pytest.raises(UserError, match=r"model\.chat_template is neither"):
        load_tokenizer(tmp_path / "t", Model(chat_template="no_such_file"))


def test_what_would_never_be_found_in_a_response_is_told(tokenizers: list[object]) -> None:
    for tokenizer in tokenizers:
        check_stops(["\n\n", "eos", "<"], tokenizer)
        with pytest.raises(
            UserError, match=r"'<eos>\\n' would never be found.* rollout\.stop_token_ids=\[1\]"
        ):
            check_stops(["a", "<eos>\n"], tokenizer)


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no directory"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match="no tokenizer could be read"):
        load_tokenizer(tmp_path)
    build_char_tokenizer("ab", tmp_path / "t")
    config_path = tmp_path / "t" / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    del config["eos_token"]
    config_path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="no end-of-sequence token"):
        load_tokenizer(tmp_path / "t")


def test_a_plain_tokenizer_is_read_as_the_one_that_takes_any_reads_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    build_char_tokenizer(ALPHABET, tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for model_type in ("glm4_moe", "gpt_oss", "llama", "mistral", "mixtral", "qwen3", "qwen3_moe"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 99}))
        for name in _PLAIN:
            file.write_text(json.dumps(config | {"tokenizer_class": name}))
            ours, auto = (
                load_tokenizer(tmp_path),
                AutoTokenizer.from_pretrained(tmp_path, local_files_only=True),
            )
            assert type(ours) is type(auto), (model_type, name)
            saved = []
            for tokenizer, to in ((ours, tmp_path / "ours"), (auto, tmp_path / "auto")):
                tokenizer.save_pretrained(to)
                saved.append({one.name: one.read_bytes() for one in to.iterdir()})
            assert saved[0] == saved[1], (model_type, name)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama", "mimo", "qwen2", "qwen3_moe"])
def test_a_plain_tokenizer_is_what_its_file_says_in_every_family(tmp_path: Path, model_type: str) -> None:
    """Beside a qwen2 config AutoTokenizer would cut these words as Qwen2 does, into nothing."""
    words = ("yes", "no", "[unknown]", "[end]")
    made = RustTokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=words[2]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=words[3]).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert load_tokenizer(tmp_path)("yes no yes")["input_ids"] == [0, 1, 0]


def test_a_plain_tokenizer_is_read_without_what_models_are_made_of(tmp_path: Path) -> None:
    build_char_tokenizer("abc", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    command = (
        "import sys, quintet.data.tokenizer as t; t.load_tokenizer(sys.argv[1]); "
        "sys.exit(', '.join(m for m in ('torch', 'sympy', 'accelerate') if m in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"brought in: {done.stderr}"
