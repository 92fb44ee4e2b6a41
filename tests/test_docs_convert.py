"""docs/convert.md: every command on the page is run, and says what the page shows, sizes and seconds aside."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from quintet.cli import main
from quintet.engine.convert import hf_to_mcore
from quintet.engine.weights.hf_write import Planned, hf_writer
from tests.models.directory import QWEN3, shapes_of, write_tokenizer

pytestmark = pytest.mark.usefixtures("templates_rendered_once")

PAGE = (Path(__file__).parents[1] / "docs" / "convert.md").read_text()
SAID = [
    part.partition("\n")
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for part in block.split("$ quintet ")[1:]
]
CONFIG = QWEN3 | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_size": 128,
    "head_dim": 8,
}


def flip(file: Path, tensor: bytes = b"") -> None:
    """Change a bit in the middle of the data, or of a tensor of a safetensors file."""
    content = bytearray(file.read_bytes())
    at = len(content) // 2
    if tensor:
        length = int.from_bytes(content[:8], "little")
        at = 8 + length + json.loads(content[8 : 8 + length])[tensor.decode()]["data_offsets"][0]
    content[at] ^= 1
    file.write_bytes(content)


def write(path: Path, changes: dict[str, int] | None = None) -> None:
    with hf_writer(path, [Planned(n, s, torch.bfloat16) for n, s in shapes_of(CONFIG).items()]) as writer:
        for name, shape in shapes_of(CONFIG).items():
            writer.add(name, torch.randn(shape).to(torch.bfloat16))
        (writer.directory / "config.json").write_text(json.dumps(CONFIG | (changes or {})))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The directories that the page speaks of."""
    place = tmp_path_factory.mktemp("convert")
    for name in ("Qwen", "bit", "cut"):
        write(place / name)
    write(place / "thirteen-layers", {"num_hidden_layers": 13})
    flip(place / "bit" / "model.safetensors", b"model.layers.3.mlp.up_proj.weight")
    cut = place / "cut" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    hf_to_mcore(place / "Qwen", place / "flipped", tp=2, pp=2)
    flip(place / "flipped" / "__1_0.distcp")
    return place


def spaced(text: str) -> str:
    """Without what differs by machine: numbers with units, and which tensor lies in the middle of a file."""
    text = re.sub(r"\d[\d.]* (MB|GB|s)\b(/s)?", "N", text)
    text = re.sub(r"decoder\.layers\.\d+\.[\w.]+ is damaged", "TENSOR is damaged", text)
    return " ".join(text.split())


@pytest.mark.parametrize(("command", "_", "said"), SAID, ids=[row[0] for row in SAID])
def test_what_the_page_shows_is_what_comes_out(place, monkeypatch, capsys, command, _, said):
    monkeypatch.chdir(place)
    code = main(shlex.split(command))
    caught = capsys.readouterr()
    out = spaced(caught.out + caught.err)
    assert code == (2 if said.startswith("error:") else 0), out
    first, *others = [" ".join(piece.split()) for piece in spaced(said).split("…")]
    assert out.startswith(first), out
    assert all(piece in out for piece in others), out


def test_python_on_the_page_runs(place, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(place)
    exec(code.replace('"Qwen-', '"python-'), {})
    assert (place / "python-again" / "config.json").is_file()


def test_check_verifies_weights(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for name in ("Qwen", "bit"):
        write_tokenizer(place / name)
    (place / "my.yaml").write_text("model:\n  path: Qwen\ndata:\n  task: addition\n")
    assert main(["check", "my.yaml", "--verify-weights"]) == 0
    assert "Weights: 1 of 1 files verified by their checksums." in capsys.readouterr().err
    assert main(["check", "my.yaml", "model.path=bit", "--verify-weights"]) == 2
    assert "bit/model.safetensors: model.layers.3.mlp.up_proj.weight is damaged" in capsys.readouterr().err
    assert main(["check", "my.yaml", "model.path=bit"]) == 0
