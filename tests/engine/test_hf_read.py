"""Any box of a tensor is read into any view of it, in pieces of any size, however little the system reads at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from quintet.engine.weights import hf_read, hf_write
from quintet.engine.weights.hf_read import CHUNK_BYTES, THREADS, HfReader, same_bytes
from quintet.engine.weights.hf_write import Planned, hf_writer
from quintet.engine.weights.shards import Shard
from quintet.errors import UserError
from quintet.models import checksums
from quintet.models.fp8_blocks import SCALE
from quintet.models.mcore import whole_box
from quintet.models.weights_on_disk import find_weights

BLOCK_BYTES = 64
GROUPS, HEADS, HEAD_DIM = 4, 3, 2
ROWS = GROUPS * HEADS * HEAD_DIM
FULL = {
    "before": torch.arange(10.0),
    "vector": torch.randn(ROWS),
    "matrix": torch.randn(ROWS, 7),
    "experts": torch.randn(3, ROWS, 5),
}
MANY = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of checksums: tensors have several, and few pieces begin where one does."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(hf_read, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(hf_write, "PART_BYTES", 3 * BLOCK_BYTES)


def saved(path: Path, tensors: dict[str, Tensor]) -> Path:
    """With checksums."""
    with hf_writer(path, [Planned(n, tuple(one.shape), one.dtype) for n, one in tensors.items()]) as writer:
        for name, one in tensors.items():
            writer.add(name, one)
    return path


def view_of(kind: str, sizes: list[int], dtype: torch.dtype) -> Tensor:
    """Memory for a box, laid out as an engine's parameter of that kind is."""
    if kind == "transposed":
        return torch.full(sizes[::-1], 7.0, dtype=dtype).permute(*range(len(sizes) - 1, -1, -1))
    *outer, rows, inner = sizes if len(sizes) > 1 else (*sizes, 1)
    if kind == "heads of groups":
        held = torch.full((*outer, rows // (HEADS * HEAD_DIM), HEADS + 2, HEAD_DIM, inner), 7.0, dtype=dtype)
        view = held.narrow(len(outer) + 1, 0, HEADS)
    elif kind == "in turns":
        view = torch.full((*outer, 2, rows // 2, inner), 7.0, dtype=dtype).transpose(-3, -2)
    else:
        view = torch.full((*outer, rows, inner), 7.0, dtype=dtype)
    return view if len(sizes) > 1 else view[..., 0]


UNITS = {"plain": 1, "transposed": 1, "heads of groups": HEADS * HEAD_DIM, "in turns": 2}


@st.composite
def boxes(draw: Any, shape: tuple[int, ...], unit: int) -> tuple[tuple[int, int], ...]:
    """Of whole units along the rows; where these are single rows, maybe of none, as a rank's may all be padding."""
    box = []
    for dim, size in enumerate(shape):
        step = unit if dim == max(0, len(shape) - 2) else 1
        first = draw(st.integers(0, size // step - 1))
        box.append((first * step, draw(st.integers(first + (unit > 1 or dim > 0), size // step)) * step))
    return tuple(box)


@pytest.mark.usefixtures("small_blocks")
def test_any_box_in_any_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(FULL, plain / "model.safetensors")
    ways = [find_weights(plain), find_weights(saved(tmp_path / "summed", FULL))]
    original = os.preadv

    @MANY
    @given(st.data())
    def check(data: st.DataObject) -> None:
        shards = []
        for name in data.draw(st.permutations(["vector", "matrix", "experts"])):
            kind, dtype = (
                data.draw(st.sampled_from(one))
                for one in ((*UNITS,), (torch.float32, torch.float64, torch.bfloat16))
            )
            shape = tuple(FULL[name].shape)
            box = data.draw(boxes(shape, UNITS[kind]))
            shards.append(Shard(name, shape, box, view_of(kind, [b - a for a, b in box], dtype)))
        most = data.draw(st.integers(1, 300))

        def read(descriptor: int, buffers: list[memoryview], at: int) -> int:
            return original(descriptor, [buffers[0][:most]], at)

        monkeypatch.setattr(hf_read.os, "preadv", read)
        monkeypatch.setattr(hf_read, "CHUNK_BYTES", data.draw(st.integers(1, 600)))
        with HfReader(data.draw(st.sampled_from(ways))) as reader:
            reader.fill(shards)
        for one in shards:
            part = FULL[one.name][tuple(slice(*ends) for ends in one.box)]
            assert torch.equal(one.read(), part.to(one.view.dtype))

    check()


def plain(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path


def shards_of(tensors: dict[str, Tensor]) -> list[Shard]:
    return [
        Shard(n, tuple(one.shape), whole_box(one.shape), torch.empty_like(one)) for n, one in tensors.items()
    ]


def said(path: Path) -> str:
    with HfReader(find_weights(path)) as reader, pytest.raises(UserError) as caught:
        reader.fill(shards_of(FULL))
    return str(caught.value)


def _cannot(descriptor: int, buffers: list[memoryview], at: int) -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("fault", "words"),
    [(_cannot, "Input/output error"), (lambda *_: 0, "the file ends before it")],
    ids=["an error of the disk", "a file cut while it is read"],
)
def test_what_cannot_be_read_is_named_and_ends_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., int], words: str
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(hf_read.os, "preadv", lambda *asked: (calls.append(1), fault(*asked))[1])
    monkeypatch.setattr(hf_read, "CHUNK_BYTES", 1)
    message = said(plain(tmp_path / "model", FULL))
    assert f"{tmp_path / 'model' / 'model.safetensors'}: before cannot be read: {words}" in message
    assert len(calls) <= THREADS, "each thread finds out for itself at most"


def test_a_small_model_is_read_from_its_begin_to_its_end_through_one_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All buffers together are no more than its largest tensor."""
    original, reads = os.preadv, []

    def read(descriptor: int, buffers: list[memoryview], at: int) -> int:
        reads.append((threading.get_ident(), at))
        time.sleep(0.002)
        return original(descriptor, buffers, at)

    monkeypatch.setattr(hf_read.os, "preadv", read)
    tensors = {f"layers.{n}": torch.ones(4) for n in range(20)}
    for size, most in ((4, 1), (CHUNK_BYTES, 3)):
        tensors["large"] = torch.ones(size)  # 32 MiB: of a buffer and blocks beside it
        with HfReader(find_weights(plain(tmp_path / str(size), tensors))) as reader:
            reader.fill(shards_of(tensors)[::-1])
        threads, places = zip(*reads, strict=True)
        assert len(set(threads)) <= most
        assert most > 1 or places == tuple(sorted(places))
        reads.clear()


def test_the_same_bytes_are_of_the_same_type_and_scales(tmp_path: Path) -> None:
    numbers = torch.randn(300, 200)
    other = numbers.clone()
    other[-1, -1] += 1
    small = numbers.to(torch.float8_e4m3fn)
    scales = torch.ones(3, 2)
    weights = find_weights(
        plain(
            tmp_path / "model",
            {
                "a": numbers,
                "b": numbers.clone(),
                "other": other,
                "int": numbers.view(torch.int32).clone(),
                "one": small,
                f"one{SCALE}": scales,
                "two": small.clone(),
                f"two{SCALE}": scales.clone(),
                "scaled": small.clone(),
                f"scaled{SCALE}": 2 * scales,
            },
        )
    ).tensors
    for chunk in (1000, CHUNK_BYTES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf_read, "CHUNK_BYTES", chunk)
            assert same_bytes(weights["a"], weights["b"])
            assert same_bytes(weights["one"], weights["two"])
            for a, b in (("a", "other"), ("a", "int"), ("one", "scaled")):
                assert not same_bytes(weights[a], weights[b])
