"""Weights are checked from their headers, before anything starts: names, files, shapes, types."""

import json
from pathlib import Path
from unittest import mock

import pytest

from quintet.errors import UserError
from quintet.models import check_weights, held_shape, read_shape
from tests.models.directory import DEEPSEEK_V3, QWEN3, shapes_of, write_model, write_weights

SHAPES = shapes_of(QWEN3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_weights(path, read_shape(path))
    return str(caught.value)


def shard(path: Path) -> Path:
    """Turn the one file into two and an index; the index's path."""
    (path / "model.safetensors").unlink()
    names = list(SHAPES)
    weight_map = {}
    for file, part in (("a.safetensors", names[:9]), ("b.safetensors", names[9:])):
        write_weights(path / file, {name: SHAPES[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def test_whole_weights_pass(path: Path) -> None:
    check_weights(path, read_shape(path))
    shard(path)
    check_weights(path, read_shape(path))


def test_names_shapes_and_types(path: Path) -> None:
    file = path / "model.safetensors"
    write_weights(file, {n: s for n, s in SHAPES.items() if n != "model.norm.weight"} | {"stray": (1,)})
    assert "missing: model.norm.weight; left over: stray" in refused(path)
    write_weights(file, SHAPES | {"model.norm.weight": (63,)})
    assert f"{file}: model.norm.weight has shape (63,), config.json implies (64,)" in refused(path)
    write_weights(file, SHAPES, dtype="I16")
    assert "is of type I16; expected F64" in refused(path)
    write_weights(file, SHAPES | {"lm_head.weight": (100, 64)})  # tied models carry it at times
    check_weights(path, read_shape(path))
    write_weights(file, {})
    assert "more" in refused(path)


def test_a_value_model_starts_without_a_head_and_keeps_it(path: Path) -> None:
    file = path / "model.safetensors"
    check_weights(path, read_shape(path).as_value_model())  # of a language model
    value = QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "value"}}
    (path / "config.json").write_text(json.dumps(value))
    assert "missing: score.weight" in refused(path)
    write_weights(file, SHAPES | {"score.weight": (1, 64)})
    check_weights(path, read_shape(path))


def test_damaged_files(path: Path) -> None:
    file = path / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    damaged = (length).to_bytes(8, "little") + b"[" * length
    for content, said in (
        (b"", "not a sound safetensors file"),
        (whole[:100], "not a sound safetensors file"),
        (whole[:-1], "file not fully covered"),
        (damaged, "invalid JSON in header"),
        ((2).to_bytes(8, "little") + b"[]", "invalid JSON in header"),
        ((12).to_bytes(8, "little") + b'{"x": {}    ', "invalid JSON in header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a sound safetensors file"),
    ):
        file.write_bytes(content)
        message = refused(path)
        assert said in message
        assert str(file) in message
    file.unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(path)


def test_a_bad_index(path: Path) -> None:
    index = shard(path)
    good = json.loads(index.read_text())["weight_map"]
    for content, said in (
        ("{", "not valid JSON"),
        ("{}", 'expected a "weight_map" object'),
        ('{"weight_map": []}', 'expected a "weight_map" object'),
        ('{"weight_map": {"x": 3}}', 'expected a "weight_map" object'),
    ):
        index.write_text(content)
        assert said in refused(path)
        assert str(index) in refused(path)
    index.write_text(json.dumps({"weight_map": good | {"model.norm.weight": "a.safetensors"}}))
    assert "a.safetensors: model.norm.weight is not in it" in refused(path)
    index.write_text(json.dumps({"weight_map": good}))
    (path / "b.safetensors").unlink()
    assert "b.safetensors is missing" in refused(path)


def test_which_layers_a_large_directory_holds_is_told_by_its_index_alone(tmp_path: Path) -> None:
    path = write_model(tmp_path, DEEPSEEK_V3 | {"num_nextn_predict_layers": 1})
    names = shapes_of(DEEPSEEK_V3 | {"num_nextn_predict_layers": 1})
    (path / "model.safetensors").rename(path / "a.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    with mock.patch("quintet.models.weights_on_disk.read_header", side_effect=AssertionError):
        assert held_shape(path).mtp_layers == 1
        index.write_text(json.dumps({"weight_map": dict.fromkeys(shapes_of(DEEPSEEK_V3), "a.safetensors")}))
        assert held_shape(path).mtp_layers == 0
