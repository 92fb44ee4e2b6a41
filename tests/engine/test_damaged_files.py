"""Damaged weights: every flip and cut is an error that names the file, or changes nothing that is loaded."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintet.engine.weights.hf import check_hf, fill_hf
from quintet.engine.weights.hf_write import Planned, hf_writer
from quintet.engine.weights.shards import Shard
from quintet.errors import UserError
from quintet.models import read_shape
from quintet.models.checksums import BLOCK_BYTES, verify_files
from quintet.models.mcore import whole_box
from quintet.models.weights_on_disk import find_weights
from tests.models.directory import QWEN3, shapes_of

SHAPES = shapes_of(QWEN3)
MANY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def model(path: Path, dtype: torch.dtype = torch.bfloat16, shard_bytes: int = 1 << 30) -> dict[str, Tensor]:
    """A directory as quintet writes it; what it holds."""
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}
    planned = [Planned(name, tuple(one.shape), dtype) for name, one in tensors.items()]
    with hf_writer(path, planned, shard_bytes) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        (writer.directory / "config.json").write_text(json.dumps(QWEN3))
    return tensors


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """All tensors of a directory read from their files, by one process."""
    shards = [
        Shard(name, shape, whole_box(shape), torch.full(shape, 7.0, dtype=dtype))
        for name, shape in SHAPES.items()
    ]
    fill_hf(shards, check_hf(read_shape(path), path))
    return {shard.name: shard.view for shard in shards}


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        loaded(path)
    return str(caught.value)


def flip(file: Path, at: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


def data_start(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "model"
    return path, model(path)


@pytest.fixture
def copy(sound, tmp_path):
    """Makes a fresh copy of the sound model; returns its one file."""

    def make() -> Path:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        return shutil.copytree(sound[0], tmp_path / "model") / "model.safetensors"

    return make


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000])
def test_what_is_written_is_what_is_loaded_here_and_elsewhere(tmp_path, dtype, shard_bytes):
    written = model(tmp_path / "model", dtype, shard_bytes)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 1 << 30)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    elsewhere = {name: one for file in files for name, one in load_file(file).items()}
    for into in (dtype, torch.float32):
        here = loaded(tmp_path / "model", into)
        assert all(torch.equal(here[name], one.to(into)) for name, one in written.items())
    assert all(torch.equal(elsewhere[name], one) for name, one in written.items())


def test_every_flip_of_the_data_names_file_and_tensor(sound, copy):
    @MANY
    @given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def check(place: float, bit: int) -> None:
        file = copy()
        begin, size = data_start(file), file.stat().st_size
        at = begin + int(place * (size - begin))
        entries = find_weights(file.parent).headers[file].tensors
        name = next(n for n, one in entries.items() if one.start <= at < one.stop)
        flip(file, at, bit)
        said = refused(file.parent)
        assert f"{file}: {name} is damaged" in said
        with pytest.raises(UserError, match=f"{name} is damaged"):
            verify_files(file.parent, [file])

    check()


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flip_of_the_header_never_changes_what_is_loaded(sound, copy, checksums):
    _, written = sound

    @MANY
    @given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def check(place: float, bit: int) -> None:
        file = copy()
        if not checksums:
            save_file(written, file, metadata={"format": "pt"})
        flip(file, int(place * data_start(file)), bit)
        said, found = None, written
        try:
            found = loaded(file.parent, torch.bfloat16)
        except UserError as error:
            said = str(error)
        assert said is None or str(file.parent) in said
        assert all(torch.equal(found[name], one) for name, one in written.items())

    check()


def test_every_cut_names_the_file(copy):
    @MANY
    @given(place=st.floats(0, 1, exclude_max=True))
    def check(place: float) -> None:
        file = copy()
        file.write_bytes(file.read_bytes()[: int(place * file.stat().st_size)])
        assert str(file) in refused(file.parent)

    check()


def test_a_flip_without_checksums_is_seen_where_a_value_is_no_number(sound, copy):
    for bad in (math.nan, math.inf, -math.inf):
        file = copy()
        tensors = {name: one.clone() for name, one in sound[1].items()}
        tensors["model.layers.3.mlp.up_proj.weight"][5, 7] = bad
        save_file(tensors, file, metadata={"format": "pt"})
        said = refused(file.parent)
        assert f"{file}: model.layers.3.mlp.up_proj.weight holds values that are not finite" in said


def test_large_values_are_no_fault(sound, copy):
    """Their sum overflows, and none of them is infinite."""
    file = copy()
    tensors = {name: torch.full_like(one, 3e38) for name, one in sound[1].items()}
    save_file(tensors, file, metadata={"format": "pt"})
    assert all(torch.isfinite(one).all() for one in loaded(file.parent, torch.bfloat16).values())


def rewritten(file: Path, change) -> None:
    """The file with another header of whatever length; its data stays."""
    content, begin = file.read_bytes(), data_start(file)
    header = json.loads(content[8:begin])
    change(header)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[begin:])


def test_headers_that_lie(copy):
    norm = "model.norm.weight"

    def shift(by: int):
        def change(header):
            header[norm]["data_offsets"] = [n + by for n in header[norm]["data_offsets"]]

        return change

    for change, said in (
        (shift(-2), f"invalid offset for tensor `{norm}`"),
        (shift(2), f"invalid offset for tensor `{norm}`"),
        (lambda h: h[norm].update(dtype="F32"), "invalid shape, data type, or offset for tensor"),
        (lambda h: h[norm].update(dtype="I16"), f"{norm} is of type I16"),
        (lambda h: h[norm].update(shape=[8, 8]), f"{norm} has shape (8, 8), config.json implies (64,)"),
        (lambda h: h[norm].update(shape=[-64]), "invalid value: integer `-64`"),
        (lambda h: h[norm].update(shape=[True]), "invalid type: boolean `true`"),
        (lambda h: h.update({norm + "x": h.pop(norm)}), f"missing: {norm}; left over: {norm}x"),
        (
            lambda h: h["__metadata__"].update({"quintet.crc32": "{}"}),
            "checksums (quintet.crc32) are damaged",
        ),
    ):
        file = copy()
        rewritten(file, change)
        assert said in refused(file.parent), said
        assert str(file.parent) in refused(file.parent)


def test_a_name_that_is_there_twice(copy):
    file = copy()
    content, begin = file.read_bytes(), data_start(file)
    text = content[8:begin].replace(b"layers.0.mlp.up_proj", b"layers.0.mlp.gate_proj").rstrip() + b" "
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[begin:])
    assert (
        "not a sound safetensors file (Error while deserializing header: invalid offset for tensor"
        in refused(file.parent)
    )


def test_bytes_that_belong_to_no_tensor(copy):
    file = copy()
    file.write_bytes(file.read_bytes() + b"12345")
    assert "file not fully covered" in refused(file.parent)


def test_an_index_that_is_not_of_these_files(tmp_path):
    path = tmp_path / "model"
    model(path, shard_bytes=60_000)
    index = path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    files = sorted(set(whole["weight_map"].values()))
    first = next(name for name, file in whole["weight_map"].items() if file == files[0])

    def said(weight_map: dict[str, str]) -> str:
        index.write_text(json.dumps({"weight_map": weight_map}))
        return refused(path)

    assert f"{first} is in it, but {index} says it is in {files[1]}" in said(
        whole["weight_map"] | {first: files[1]}
    )
    assert f"{first} is in it, but {index} does not name that tensor" in said(
        {name: file for name, file in whole["weight_map"].items() if name != first}
    )
    assert f"x is not in it, though {index} says so" in said(whole["weight_map"] | {"x": files[0]})
    assert "outside of the directory" in said(whole["weight_map"] | {first: "../elsewhere.safetensors"})
    index.write_text(json.dumps(whole))
    assert loaded(path)
    shutil.copy(path / files[0], path / "consolidated.safetensors")  # not named, and not looked at
    assert loaded(path)
    shutil.copy(path / files[0], path / "model.safetensors")
    assert "both model.safetensors and model.safetensors.index.json are there" in refused(path)
    (path / "model.safetensors").unlink()
    (path / files[1]).unlink()
    assert f"{path / files[1]} is missing" in refused(path)


def test_files_behind_symlinks(sound, tmp_path):
    """As in the hub's cache: blobs by their digests, and links to them."""
    import hashlib

    blobs, path = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    path.mkdir(parents=True)
    for file in sound[0].iterdir():
        content = file.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        digest = hashlib.sha256(content).hexdigest() if file.suffix == ".safetensors" else git
        (blobs / digest).write_bytes(content)
        (path / file.name).symlink_to(Path("..") / ".." / "blobs" / digest)
    assert all(torch.equal(one, sound[1][name].float()) for name, one in loaded(path).items())
    assert verify_files(path, [path / "model.safetensors"]) == []
    for name, kind in (("config.json", "git blob id"), ("model.safetensors", "SHA-256")):
        whole = (path / name).read_bytes()
        flip((path / name).resolve(), len(whole) - 1, 0)
        if name == "config.json":
            with pytest.raises(UserError, match=f"{name} is damaged: its {kind}"):
                verify_files(path, [path / "model.safetensors"])
        else:  # quintet's own checksum tells the tensor
            with pytest.raises(UserError, match=r"model\.norm\.weight is damaged"):
                verify_files(path, [path / "model.safetensors"])
        (path / name).resolve().write_bytes(whole)


def test_a_downloaded_directory_is_verified_by_what_the_hub_wrote_beside_it(sound, tmp_path):
    import hashlib

    path = tmp_path / "model"
    path.mkdir()
    shutil.copy(sound[0] / "config.json", path)
    file = path / "model.safetensors"
    save_file(sound[1], file, metadata={"format": "pt"})
    (note,) = verify_files(path, [file])
    assert str(file) in note
    assert "not verified" in note
    beside = path / ".cache" / "huggingface" / "download"
    beside.mkdir(parents=True)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (beside / "model.safetensors.metadata").write_text(f"0123abcd\n{digest}\n1700000000.0\n")
    assert verify_files(path, [file]) == []
    flip(file, data_start(file) + 1000, 2)
    with pytest.raises(
        UserError, match=rf"model\.safetensors is damaged: its SHA-256 is .*, the hub's is {digest}"
    ):
        verify_files(path, [file])


def test_a_part_of_a_tensor_is_checked_with_the_blocks_around_it(tmp_path):
    """Rows from the middle of a tensor of several blocks: damage there is seen, damage elsewhere is not this rank's."""
    rows, columns = 1000, 700  # of 4 bytes: about 11 blocks, and no row ends where one does
    config = QWEN3 | {"vocab_size": rows, "hidden_size": columns, "num_hidden_layers": 1}
    shapes = shapes_of(config)
    full = torch.randn(rows, columns)
    path, name = tmp_path / "model", "model.embed_tokens.weight"
    with hf_writer(path, [Planned(n, s, torch.float32) for n, s in shapes.items()]) as writer:
        for one, shape in shapes.items():
            writer.add(one, full if one == name else torch.ones(shape))
        (writer.directory / "config.json").write_text(json.dumps(config))
    file = path / "model.safetensors"
    for box in (((333, 667), (0, columns)), ((333, 667), (100, 350)), ((0, rows), (350, 700))):
        for dtype in (torch.float32, torch.bfloat16):
            size = tuple(b - a for a, b in box)
            shard = Shard(name, (rows, columns), box, torch.zeros(size, dtype=dtype))
            fill_hf([shard], check_hf(read_shape(path), path))
            want = full[box[0][0] : box[0][1], box[1][0] : box[1][1]].to(dtype)
            assert torch.equal(shard.view, want)
    start = find_weights(path).tensors[name].entry.start
    shard = Shard(name, (rows, columns), ((333, 667), (0, columns)), torch.zeros(334, columns))
    for row, seen in ((0, False), (500, True), (999, False)):
        flip(file, start + row * columns * 4 + 2, 0)
        if seen:
            with pytest.raises(UserError, match=f"{name} is damaged"):
                fill_hf([shard], check_hf(read_shape(path), path))
        else:
            fill_hf([shard], check_hf(read_shape(path), path))
        flip(file, start + row * columns * 4 + 2, 0)
    assert 333 * columns * 4 > BLOCK_BYTES


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 7}, "missing: model.layers.6."),
        ({"num_hidden_layers": 5}, "left over: model.layers.5."),
        ({"num_attention_heads": 16}, "q_proj.weight has shape (64, 64), config.json implies (128, 64)"),
        ({"num_key_value_heads": 4}, "k_proj.weight has shape (16, 64), config.json implies (32, 64)"),
        ({"vocab_size": 101}, "embed_tokens.weight has shape (100, 64), config.json implies (101, 64)"),
        ({"tie_word_embeddings": False}, "missing: lm_head.weight"),
        ({"intermediate_size": 97}, "gate_proj.weight has shape (96, 64), config.json implies (97, 64)"),
    ],
    ids=str,
)
def test_a_config_that_disagrees_with_the_weights(copy, change, said):
    file = copy()
    (file.parent / "config.json").write_text(json.dumps(QWEN3 | change))
    assert said in refused(file.parent)
    assert str(file.parent) in refused(file.parent)


def test_a_tied_model_with_a_head_of_its_own(sound, copy):
    file = copy()
    embedding = sound[1]["model.embed_tokens.weight"]
    save_file(sound[1] | {"lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    assert loaded(file.parent)  # some checkpoints carry it twice
    save_file(sound[1] | {"lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})
    assert "lm_head.weight differs from model.embed_tokens.weight" in refused(file.parent)
    untied = json.loads((file.parent / "config.json").read_text()) | {"tie_word_embeddings": False}
    (file.parent / "config.json").write_text(json.dumps(untied))
    check_hf(read_shape(file.parent), file.parent)


def test_the_head_of_a_value_model_that_a_language_model_becomes_is_zero(sound):
    path, written = sound
    shape = read_shape(path).as_value_model()
    shards = [
        Shard(name, full, whole_box(full), torch.full(full, 7.0))
        for name, full in (("score.weight", (1, 64)), ("model.norm.weight", (64,)))
    ]
    fill_hf(shards, check_hf(shape, path))
    head, norm = shards
    assert (head.view == 0).all()
    assert torch.equal(norm.view, written[norm.name].float())


def test_nothing_is_written_before_all_headers_are_read(sound, copy):
    file = copy()
    rewritten(file, lambda h: h.update({"model.norm.weightx": h.pop("model.norm.weight")}))
    shards = [Shard("model.norm.weight", (64,), ((0, 64),), torch.full((64,), 7.0))]
    with pytest.raises(UserError):
        fill_hf(shards, check_hf(read_shape(file.parent), file.parent))
    assert (shards[0].view == 7).all()


def broken_on_one_rank(path: Path) -> list[str]:
    """An engine whose first stage holds the damaged tensor: what each rank's calls say."""
    from quintet.engine.engine import Engine
    from quintet.recipe import schema

    engine = Engine(
        read_shape(path), schema.Layout(pp=2), engine=schema.Engine(), optimizer=None, dtype="fp32"
    )
    said = []
    for call in (
        lambda: engine.load_hf(path),
        engine.shard_map,
        lambda: engine.save_hf(path / "out", path),
    ):
        try:
            call()
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


def test_all_ranks_refuse_what_one_found_damaged(pool, copy):
    file = copy()
    flip(file, find_weights(file.parent).tensors["model.layers.1.mlp.up_proj.weight"].entry.start, 3)
    first, second = pool.run(broken_on_one_rank, 2, file.parent)
    assert first == second
    assert "model.layers.1.mlp.up_proj.weight is damaged" in first[0]
    assert all("the weights are incomplete" in one for one in first[1:])
    assert not (file.parent / "out").exists()


def compared(path: Path) -> str:
    try:
        check_hf(read_shape(path), path)
    except UserError as error:
        return str(error)
    return ""


def test_all_ranks_refuse_what_the_first_alone_compares(pool, sound, copy):
    file = copy()
    head = {"lm_head.weight": sound[1]["model.embed_tokens.weight"] + 1}
    save_file(sound[1] | head, file, metadata={"format": "pt"})
    first, second = pool.run(compared, 2, file.parent)
    assert first == second
    assert "lm_head.weight differs from model.embed_tokens.weight" in first


def full_disk(path: Path, out: Path) -> tuple[str, str]:
    """On each of two ranks: what is said of a disk that fills up, and of a directory that is there."""
    from quintet.engine.engine import Engine
    from quintet.engine.weights import hf_write
    from quintet.recipe import schema

    engine = Engine(
        read_shape(path), schema.Layout(tp=2), engine=schema.Engine(), optimizer=None, dtype="fp32"
    )
    engine.load_hf(path)
    original = hf_write.os.pwrite

    def pwrite(descriptor: int, data: memoryview, at: int) -> int:
        if at > 100_000:  # what comes of it later is not what is told
            raise OSError(28, "No space left on device") if at < 200_000 else OSError(5, "Input/output error")
        return original(descriptor, data, at)

    def said(to: Path) -> str:
        with pytest.raises(UserError) as caught:
            engine.save_hf(to, path)
        return str(caught.value)

    with mock.patch.object(hf_write.os, "pwrite", pwrite):
        return said(out), said(path)


def test_a_full_disk_is_told_to_all_and_leaves_nothing(pool, sound, tmp_path):
    out = tmp_path / "out"
    first, second = pool.run(full_disk, 2, sound[0], out)
    assert first == second
    assert f"{out} cannot be written: the disk is full" in first[0]
    assert f"{sound[0]} is there already" in first[1]
    assert not list(tmp_path.iterdir())


def test_what_is_there_already_is_not_overwritten(sound, tmp_path):
    (tmp_path / "model").mkdir()
    model(tmp_path / "model")  # empty: nothing is lost
    with pytest.raises(UserError, match="is there already"):
        model(tmp_path / "model")
