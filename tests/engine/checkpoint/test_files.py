"""Files that are damaged, missing or made to do harm are refused by name, and do nothing."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from quintet.engine.checkpoint.format import CHECKSUMS, INDEX, TensorFile, publish, write_json
from quintet.engine.checkpoint.reader import Reader
from quintet.engine.checkpoint.unpickle import unpickle
from quintet.errors import DamagedCheckpoint, UserError
from quintet.models.mcore import meet, overlapping, whole_box

WHOLE = {
    "a": torch.arange(30.0).view(6, 5),
    "b": torch.arange(3.0).bfloat16(),
    "c": torch.arange(8.0).view(2, 2, 2),
}


def write(path: Path) -> Path:
    """A checkpoint of two files, `a` in three chunks."""
    path.mkdir()
    a = WHOLE["a"]
    with TensorFile(path / "__0_0.distcp") as first, TensorFile(path / "__1_0.distcp") as second:
        first.add("a", (6, 5), ((0, 4), (0, 5)), a[:4].clone())
        second.add("a", (6, 5), ((4, 6), (0, 3)), a[4:, :3].clone())
        second.add("a", (6, 5), ((4, 6), (3, 5)), a[4:, 3:].clone())
        first.add("b", (3,), ((0, 3),), WHOLE["b"])
        second.add("c", (2, 2, 2), ((0, 2),) * 3, WHOLE["c"])
    entries = first.entries + second.entries
    write_json(path / "rng-00000.json", {"torch": "00"})
    publish(path, entries, {"steps": 3})
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("files") / "saved")


def read_all(path: Path) -> dict[str, torch.Tensor]:
    reader = Reader(path)
    reader.state()
    reader.json("rng-00000.json")
    return {k: reader.read_box(k, whole_box(t.shape)) for k, t in reader.tensors.items()}


def refusal(path: Path) -> str:
    """Why a checkpoint is not read; nothing where it is."""
    try:
        read_all(path)
    except UserError as error:
        return str(error)
    return ""


@given(st.data())
def test_any_box_is_read_back(saved, data):
    key = data.draw(st.sampled_from(sorted(WHOLE)))
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in WHOLE[key].shape]
    box = tuple((a, b) for a, b in ends)
    found = Reader(saved).read_box(key, box)
    assert torch.equal(found, WHOLE[key][tuple(slice(a, b) for a, b in box)])
    assert found.dtype == WHOLE[key].dtype


def test_every_file_is_listed_with_its_size(saved):
    listed = json.loads((saved / CHECKSUMS).read_text())["files"]
    assert set(listed) == {p.name for p in saved.iterdir()} - {CHECKSUMS}
    assert all((saved / name).stat().st_size == one["bytes"] for name, one in listed.items())


NAMES = ["__0_0.distcp", "__1_0.distcp", INDEX, "state.json", "rng-00000.json", CHECKSUMS]


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_an_error_that_names_the_file(tmp_path, name):
    path = write(tmp_path / "saved")
    file, whole = path / name, (path / name).read_bytes()
    for at in range(0, len(whole), max(len(whole) // 40, 1)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        file.write_bytes(flipped)
        said = refusal(path)
        # Of the list of checksums it may be white space, or the name of a file that nothing here reads.
        assert str(path) in said or (name == CHECKSUMS and not said)
    file.write_bytes(whole)
    assert torch.equal(read_all(path)["a"], WHOLE["a"])


def test_a_damaged_tensor_is_named(tmp_path):
    path = write(tmp_path / "saved")
    data = bytearray((path / "__1_0.distcp").read_bytes())
    data[-300] ^= 1  # in the last tensor
    (path / "__1_0.distcp").write_bytes(data)
    with pytest.raises(UserError, match=r"__1_0\.distcp: c is damaged"):
        read_all(path)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_truncated_or_missing_file_is_an_error_that_names_it(tmp_path, name):
    path = write(tmp_path / "saved")
    data = (path / name).read_bytes()
    for length in (len(data) - 1, len(data) // 2, 0):
        (path / name).write_bytes(data[:length])
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            read_all(path)
    (path / name).unlink()
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        read_all(path)


def test_ranks_that_do_not_share_a_directory(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    with TensorFile(tmp_path / "other" / "__1_0.distcp") as file:
        file.add("a", (2,), ((0, 2),), torch.zeros(2))
    with pytest.raises(UserError, match=r"rank 0 does not see __1_0\.distcp"):
        publish(tmp_path / "one", file.entries, {"steps": 0})


def test_a_file_system_that_does_not_answer_is_no_damage(tmp_path):
    path = write(tmp_path / "saved")
    for name in NAMES[:-1]:
        (path / name).rename(tmp_path / "away")
        with pytest.raises(DamagedCheckpoint):
            read_all(path)
        (path / name).symlink_to(name)  # an error that root gets too
        with pytest.raises(UserError, match="cannot be read: Too many levels of symbolic links") as error:
            read_all(path)
        assert error.type is UserError, name
        (path / name).unlink()
        (tmp_path / "away").rename(path / name)
    path.rename(tmp_path / "unmounted")
    with pytest.raises(UserError) as error:
        Reader(path)
    assert error.type is UserError


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(UserError, match="is not a checkpoint"):
        Reader(tmp_path / "nothing")


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.file),))


def replace(path: Path, name: str, data: bytes) -> None:
    """Put other bytes in a file, as someone would who also writes the checksums anew."""
    (path / name).write_bytes(data)
    sums = json.loads((path / CHECKSUMS).read_text())
    sums["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    if name in sums["tensors"]:
        reader_offsets = sums["tensors"][name]
        for offset in reader_offsets:
            reader_offsets[offset] = zlib.crc32(data[int(offset) :])
    (path / CHECKSUMS).write_text(json.dumps(sums))


def test_a_malicious_index_is_refused_and_does_not_run(tmp_path):
    path = write(tmp_path / "saved")
    replace(path, INDEX, pickle.dumps(Evil(tmp_path / "harm")))
    with pytest.raises(UserError, match=r"\.metadata is refused: it asks for posix\.mkdir"):
        Reader(path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "builtins setattr", "torch load", "torch.serialization load", "os system"]
)
def test_names_that_an_index_does_not_need(name):
    module, _, attribute = name.partition(" ")
    with pytest.raises(pickle.UnpicklingError, match="asks for"):
        unpickle(f"c{module}\n{attribute}\n.".encode())


def attribute_of(kind: str, name: str) -> bytes:
    """A member of an enum as Python before 3.11.4 pickles it, and what else could be asked for so."""
    module, _, called = kind.partition(" ")
    return f"cbuiltins\ngetattr\n(c{module}\n{called}\nV{name}\ntR.".encode()


FORMATS = "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING"


def test_an_index_of_any_python_is_read(tmp_path, monkeypatch):
    assert unpickle(attribute_of(FORMATS, "TORCH_CHANNELS_LAST")) is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name))
    )
    path = write(tmp_path / "saved")
    assert b"getattr" in (path / INDEX).read_bytes()
    assert Reader(path).tensors


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (FORMATS, "__class__"),
        (FORMATS, "_member_map_"),
        ("torch.serialization _get_layout", "__globals__"),
        ("torch Size", "__class__"),
        ("collections OrderedDict", "fromkeys"),
    ],
)
def test_nothing_but_members_of_enums_is_looked_up(kind, name):
    with pytest.raises((AttributeError, KeyError)):
        unpickle(attribute_of(kind, name))


def test_a_malicious_tensor_is_refused_and_does_not_run(tmp_path):
    path = tmp_path / "saved"
    path.mkdir()
    with TensorFile(path / "__0_0.distcp") as file:
        file.add("a", (2,), ((0, 2),), torch.zeros(2))
    publish(path, file.entries, {"steps": 0})
    torch.save(Evil(tmp_path / "harm"), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    reader = Reader(path)
    (chunk,) = reader.tensors["a"].chunks
    replace(path, "__0_0.distcp", evil + bytes(max(chunk.length - len(evil), 0)))
    with pytest.raises(UserError, match=r"__0_0\.distcp: a is (not a tensor|damaged)"):
        Reader(path).read_box("a", ((0, 2),))
    assert not (tmp_path / "harm").exists()


def test_files_outside_are_not_read(tmp_path):
    path = write(tmp_path / "saved")
    index = unpickle((path / INDEX).read_bytes())
    for one in index.storage_data.values():
        one.relative_path = "../secret"
    (tmp_path / "secret").write_bytes((path / "__0_0.distcp").read_bytes())
    replace(path, INDEX, pickle.dumps(index))
    with pytest.raises(UserError, match="outside the checkpoint"):
        Reader(path)


def spoil(path: Path, change: Any) -> None:
    """Change an index, and write its checksum anew."""
    index = unpickle((path / INDEX).read_bytes())
    change(index)
    replace(path, INDEX, pickle.dumps(index))


def shift(index: Any) -> None:
    """The two lower chunks of `a` on the same rows and columns, in part: their volumes still add up."""
    third = index.state_dict_metadata["a"].chunks[2]
    places = index.storage_data
    at = next(one for one in places if one.fqn == "a" and tuple(one.offset) == (4, 3))
    places[type(at)("a", torch.Size((4, 1)), at.index)] = places.pop(at)
    third.offsets = torch.Size((4, 1))


def test_overlapping_boxes_with_a_hole_are_refused(tmp_path):
    path = write(tmp_path / "saved")
    spoil(path, shift)
    with pytest.raises(UserError, match=r"\.metadata is damaged: a has elements of"):
        read_all(path)


@given(st.data())
def test_boxes_that_overlap_are_found(data):
    ends = st.tuples(st.integers(0, 5), st.integers(1, 3)).map(lambda one: (one[0], sum(one)))
    boxes = data.draw(st.lists(st.tuples(ends, ends), max_size=8))
    meets = any(meet(a, b) is not None for i, a in enumerate(boxes) for b in boxes[:i])
    assert (overlapping(boxes) is not None) == meets


HOSTILE: dict[str, Any] = {
    "a file that is a number": lambda i: setattr(place(i), "relative_path", 3),
    "an offset that is text": lambda i: setattr(place(i), "offset", "0"),
    "an offset below zero": lambda i: setattr(place(i), "offset", -1),
    "a length below zero": lambda i: setattr(place(i), "length", -5),
    "a length that is a fraction": lambda i: setattr(place(i), "length", 1.5),
    "a type that is none": lambda i: setattr(i.state_dict_metadata["a"].properties, "dtype", "float32"),
    "a shape of text": lambda i: setattr(i.state_dict_metadata["a"], "size", ("6", "5")),
    "a box beyond the shape": lambda i: setattr(i.state_dict_metadata["a"], "size", torch.Size((5, 5))),
    "a key that is a number": lambda i: i.state_dict_metadata.update({3: i.state_dict_metadata["a"]}),
    "no places": lambda i: setattr(i, "storage_data", None),
    "chunks that are none": lambda i: setattr(i.state_dict_metadata["a"], "chunks", [None]),
}


def place(index: Any) -> Any:
    return next(iter(index.storage_data.values()))


@pytest.mark.parametrize("what", HOSTILE)
def test_an_index_that_says_what_no_writer_says(tmp_path, what):
    path = write(tmp_path / "saved")
    spoil(path, HOSTILE[what])
    with pytest.raises(UserError, match=r"\.metadata is damaged"):
        Reader(path)


def test_flipped_bits_without_checksums_are_told_in_words_or_not_at_all(tmp_path):
    path = write(tmp_path / "saved")
    (path / CHECKSUMS).unlink()
    for name in (INDEX, "__0_0.distcp"):
        whole = (path / name).read_bytes()
        for at in range(0, len(whole), max(len(whole) // 80, 1)):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << at % 8
            (path / name).write_bytes(flipped)
            refusal(path)  # nothing but a UserError
        (path / name).write_bytes(whole)


def test_a_box_that_no_file_covers(tmp_path):
    path = write(tmp_path / "saved")
    index = unpickle((path / INDEX).read_bytes())
    index.state_dict_metadata["a"].chunks.pop()
    replace(path, INDEX, pickle.dumps(index))
    with pytest.raises(UserError, match="4 elements of a"):
        Reader(path).read_box("a", ((0, 6), (0, 5)))
