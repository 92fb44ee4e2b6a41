"""Directories are the same bytes whatever order tensors come in, and however little the system writes at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from quintet.engine.weights import hf_write
from quintet.engine.weights.hf_aux_files import copy_companions, saved_config, write_companions
from quintet.engine.weights.hf_write import THREADS, Planned, hf_writer, in_order
from quintet.errors import UserError
from quintet.models import checksums, read_shape
from quintet.models.checksums import verify_files
from quintet.runs import atomic_dir
from tests.models.directory import DEEPSEEK_V3, QWEN3, write_model

TENSORS = {
    "a": torch.randn(30, 7),
    "b": torch.randn(11).to(torch.bfloat16),
    "strided": torch.arange(40.0)[::2],
    "turned": torch.randn(5, 9).t(),
    "none": torch.empty(0, 4),
    "double": torch.randn(9, dtype=torch.float64),
}


def planned(tensors: dict[str, Tensor]) -> list[Planned]:
    return [Planned(name, tuple(one.shape), one.dtype) for name, one in tensors.items()]


def write(path: Path, names: Iterable[str] = TENSORS, shard_bytes: int | None = None) -> dict[str, bytes]:
    with hf_writer(path, planned(TENSORS), shard_bytes) as writer:
        for name in names:
            writer.add(name, TENSORS[name])
    return {one.name: one.read_bytes() for one in path.iterdir()}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(0, 40))
def test_groups_are_as_large_as_they_may_be(sizes: list[int], most: int) -> None:
    tensors = [Planned(str(n), (size,), torch.float16) for n, size in enumerate(sizes)]
    groups = list(in_order(tensors, most))
    assert [one for group in groups for one in group] == tensors
    assert all(groups)
    held = [sum(one.nbytes for one in group) for group in groups]
    assert all(nbytes <= most or len(group) == 1 for nbytes, group in zip(held, groups, strict=True))
    assert all(nbytes + later[0].nbytes > most for nbytes, later in zip(held, groups[1:], strict=False))


@pytest.mark.parametrize("shard_bytes", [None, 300])
def test_the_order_and_short_writes_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int | None
) -> None:
    first = write(tmp_path / "first", shard_bytes=shard_bytes)
    found: dict[str, Tensor] = {}
    for name in first:
        if name.endswith(".safetensors"):
            found |= load_file(tmp_path / "first" / name)
            assert int.from_bytes(first[name][:8], "little") % 8 == 0, "data begins on 8 bytes"
    assert all(torch.equal(found[name], one) for name, one in TENSORS.items())
    original = os.pwrite
    monkeypatch.setattr(hf_write.os, "pwrite", lambda to, data, at: original(to, data[:13], at))
    assert first == write(tmp_path / "second", list(TENSORS)[::-1], shard_bytes)


def test_parts_of_a_tensor_lie_behind_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hf_write.PART_BYTES % checksums.BLOCK_BYTES == 0
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 16)
    monkeypatch.setattr(hf_write, "PART_BYTES", 48)
    original, calls = hf_write.block_sums, count(1)

    def block_sums(part: memoryview) -> str:
        time.sleep(0.005 / next(calls))  # the first is done after later ones
        return original(part)

    monkeypatch.setattr(hf_write, "block_sums", block_sums)
    write(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    found = load_file(file)
    assert all(torch.equal(found[name], one) for name, one in TENSORS.items())
    assert verify_files(file.parent, [file]) == []


def test_files_are_numbered_and_in_an_index_where_there_are_some(tmp_path: Path) -> None:
    write(tmp_path / "one", shard_bytes=10_000)
    assert {one.name for one in (tmp_path / "one").iterdir()} == {"model.safetensors"}
    first = TENSORS["a"].nbytes
    write(tmp_path / "two", shard_bytes=first)
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert {one.name for one in (tmp_path / "two").iterdir()} == {*files, "model.safetensors.index.json"}
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": sum(one.nbytes for one in TENSORS.values())},
        "weight_map": {name: files[name != "a"] for name in TENSORS},
    }


def test_what_the_disk_has_no_room_for_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(one.nbytes for one in TENSORS.values())
    for free, fits in ((size, True), (size - 1, False)):
        monkeypatch.setattr(
            atomic_dir.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        if fits:
            assert write(tmp_path / "fits")
        else:
            with (
                pytest.raises(UserError, match="the disk is full"),
                hf_writer(tmp_path / "x", planned(TENSORS)),
            ):
                pytest.fail("it was begun")
    assert [one.name for one in tmp_path.iterdir()] == ["fits"]


def test_what_was_not_planned_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    for tensor, words in (
        (torch.ones(7, 30), r"a is \(7, 30\) of torch.float32, planned was .*shape=\(30, 7\)"),
        (torch.ones(30, 7).bfloat16(), r"a is \(30, 7\) of torch.bfloat16, planned was"),
    ):
        with (
            pytest.raises(ValueError, match=words),
            hf_writer(tmp_path / "model", planned(TENSORS)) as writer,
        ):
            writer.add("a", tensor)
    with pytest.raises(ValueError, match="planned and not written: double, none, strided, turned"):
        write(tmp_path / "model", "ab")
    assert not list(tmp_path.iterdir())


def slowly(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has every write take a while; the places of those that are done."""
    original, done = os.pwrite, []

    def pwrite(descriptor: int, data: Any, at: int) -> int:
        time.sleep(0.005)
        done.append(at)
        return original(descriptor, data, at)

    monkeypatch.setattr(hf_write.os, "pwrite", pwrite)
    return done


def test_no_more_is_held_than_threads_have_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = slowly(monkeypatch)
    many = {str(n): torch.ones(3) for n in range(60)}
    with hf_writer(tmp_path / "model", planned(many)) as writer:
        for n, name in enumerate(many, start=1):
            writer.add(name, many[name])
            assert n - len(done) <= 2 * THREADS + 1


def test_after_an_error_nothing_more_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = slowly(monkeypatch)
    monkeypatch.setattr(hf_write, "PART_BYTES", 4)
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 4)

    def fail() -> None:
        with hf_writer(tmp_path / "model", [Planned("a", (800,), torch.float32)]) as writer:
            writer.add("a", torch.ones(800))
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        fail()
    assert len(done) < 400


BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "qwen.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "modeling_own.py",
)


def test_what_stands_beside_the_weights_comes_along(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for name in (*BESIDE, "README.md", "model.safetensors", "config.json"):
        (source / name).write_text(f'{{"of": "{name}"}}')
    (source / "folder.py").mkdir()
    write_companions(out, source, {"model_type": "own"})
    found = {one.name: json.loads(one.read_text())["of"] for one in out.iterdir() if one.name in BESIDE}
    assert found == {name: name for name in BESIDE}
    assert json.loads((out / "config.json").read_text()) == {"model_type": "own"}
    assert {one.name for one in out.iterdir()} == {*BESIDE, "config.json"}
    copy_companions(source, tmp_path / "copied")
    copied = {one.name: json.loads(one.read_text())["of"] for one in (tmp_path / "copied").iterdir()}
    assert copied == {name: name for name in (*BESIDE, "config.json")}
    (source / "tokenizer_config.json").write_text('{"chat_template": "another", "model_max_length": 7}')
    write_companions(out, source, {}, "its own")
    assert (out / "chat_template.jinja").read_text() == "its own"
    assert not (out / "chat_template.json").exists()
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"model_max_length": 7}


def test_a_config_says_what_is_saved(tmp_path: Path) -> None:
    source = QWEN3 | {
        "torch_dtype": "float16",
        "dtype": "float16",
        "quantization_config": {"quant_method": "fp8"},
    }
    plain = read_shape(write_model(tmp_path / "plain", QWEN3))
    assert saved_config(source, plain, torch.bfloat16, 0) == QWEN3 | {"dtype": "bfloat16"}
    ahead = DEEPSEEK_V3 | {"num_nextn_predict_layers": 2}
    shape = read_shape(write_model(tmp_path / "ahead", ahead))
    assert saved_config(ahead, shape, torch.float32, 2) == ahead | {"dtype": "float32"}
    assert saved_config(ahead, shape, torch.float32, 0) == ahead | {
        "dtype": "float32",
        "num_nextn_predict_layers": 0,
    }
    value = saved_config(QWEN3, replace(plain, head="value"), torch.float32, 0)
    assert value == QWEN3 | {
        "dtype": "float32",
        "architectures": ["Qwen3ForSequenceClassification"],
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
    }
