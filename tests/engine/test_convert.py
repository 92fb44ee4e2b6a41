"""Converters: bit-exact round trips of every family, files as ranks write them, and refusals that say what is wrong."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintet.cli import main
from quintet.engine.checkpoint import parts
from quintet.engine.checkpoint.format import CHECKSUMS, TensorFile, publish
from quintet.engine.checkpoint.reader import Reader, within
from quintet.engine.convert import hf_to_mcore, mcore_to_hf
from quintet.engine.convert.parts import Parameter
from quintet.engine.weights.hf_read import HfReader
from quintet.errors import UserError
from quintet.models import check_weights, held_shape, read_shape, table_of
from quintet.models.mcore import CheckpointMap, stacked, whole_box
from quintet.packing.plan import RankCell
from tests.engine import moe_models, mtp_models
from tests.oracle import models

CASES: dict[str, tuple[Any, dict[str, int]]] = {
    "qwen2-tied": (models.save, {"tp": 2, "pp": 2}),
    "qwen3": (models.save, {"tp": 4, "pp": 2, "vpp": 2}),
    "llama": (models.save, {"pp": 4}),
    "gpt_oss": (models.save, {"tp": 2, "ep": 2, "etp": 2}),
    **{
        name: (moe_models.save, {"tp": 2, "ep": 2, "etp": 1 + i % 2, "pp": 1 + i % 2})
        for i, name in enumerate(moe_models.FAMILIES)
    },
}


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}


def assert_same(first: Path, second: Path) -> None:
    before, after = tensors(first), tensors(second)
    assert set(before) == set(after)
    for name in before:
        assert before[name].dtype == after[name].dtype, name
        assert torch.equal(before[name], after[name]), name


def there_and_back(path: Path, tmp_path: Path, **layout: Any) -> Path:
    hf_to_mcore(path, tmp_path / "mcore", **layout)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "again")
    return tmp_path / "again"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * name.endswith(("-yarn", "-halves", "-sparse")))
        for name in CASES
    ],
)
def test_every_family_comes_back_bit_for_bit(tmp_path, name):
    save, layout = CASES[name]
    path = save(name, tmp_path / "model")
    again = there_and_back(path, tmp_path, **layout)
    assert_same(path, again)
    before, after = (json.loads((one / "config.json").read_text()) for one in (path, again))
    # transformers saves no layers for multi-token prediction, and config.json still speaks of them.
    changed = {"dtype": None, "num_nextn_predict_layers": None}
    assert before | changed == after | changed
    stage = math.lcm(layout.get("tp", 1), layout.get("ep", 1) * layout.get("etp", 1))
    assert len(list((tmp_path / "mcore").glob("*.distcp"))) == stage * layout.get("pp", 1)


@pytest.mark.parametrize("family", mtp_models.KINDS)
@pytest.mark.parametrize("copies", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_for_multi_token_prediction_come_along(tmp_path, family, copies):
    path = mtp_models.save(family, tmp_path / "model", copies=copies)
    again = there_and_back(path, tmp_path, pp=2)
    assert_same(path, again)
    assert any(key.startswith("mtp.layers.0.") for key in Reader(tmp_path / "mcore").tensors)


def test_a_value_model_and_one_that_starts_from_a_language_model(tmp_path):
    path = models.save("qwen3", tmp_path / "model", head="value")
    assert_same(path, there_and_back(path, tmp_path, tp=2))


def test_many_files_mixed_types_and_a_cast(tmp_path):
    path = models.save("qwen3", tmp_path / "model")
    mixed = {name: one if "norm" in name else one.to(torch.bfloat16) for name, one in tensors(path).items()}
    (path / "model.safetensors").unlink()
    names = list(mixed)
    weight_map = {}
    for number in range(3):
        file = f"part-{number}.safetensors"
        save_file({name: mixed[name] for name in names[number::3]}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[number::3], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    again = there_and_back(path, tmp_path, tp=2)
    assert_same(path, again)
    assert json.loads((again / "config.json").read_text())["dtype"] == "bfloat16"
    mcore_to_hf(tmp_path / "mcore", tmp_path / "wide", dtype="fp32")
    assert all(torch.equal(one, mixed[name].float()) for name, one in tensors(tmp_path / "wide").items())
    hf_to_mcore(path, tmp_path / "narrow", dtype="fp16")
    assert {one.dtype for one in Reader(tmp_path / "narrow").tensors.values()} == {torch.float16}


def test_a_vocabulary_that_tp_does_not_divide_is_stored_without_padding(tmp_path):
    path = moe_models.save("qwen3_moe", tmp_path / "model")  # 61 rows
    hf_to_mcore(path, tmp_path / "mcore", tp=2)
    stored = Reader(tmp_path / "mcore").tensors["output_layer.weight"]
    assert stored.shape == (61, 64)
    assert [one.box[0] for one in stored.chunks] == [(0, 31), (31, 61)]


def restack(path: Path, source: Path, *, padding: int = 0, beside: tuple[str, ...] = ()) -> None:
    """The checkpoint as megatron-core writes it by default: layers and experts in stacks, vocabulary padded, no checksums."""
    shape = held_shape(source)
    table = CheckpointMap(table_of(shape))
    layers = None if shape.moe else shape.layers
    path.mkdir()
    file = TensorFile(path / "__0_0.distcp")
    with HfReader(check_weights(source, shape)) as reader:
        for weight in table.weights.values():
            held = Parameter(table, weight, shape, torch.float32)
            reader.fill(held.shards)
            for block, view in held.blocks.values():
                at = stacked(block, experts=shape.moe.experts if shape.moe else 0, layers=layers)
                if weight.split == "vocab":
                    view = torch.cat([view, torch.zeros(padding, view.shape[1])])
                    at = type(at)(at.key, tuple(view.shape), whole_box(view.shape), 0)
                file.add(at.key, at.shape, at.box, view.clone())
    for key in beside:
        file.add(key, (2,), ((0, 2),), torch.zeros(2))
    publish(path, file.close(), {"steps": 3})
    (path / CHECKSUMS).unlink()
    (path / "state.json").unlink()


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_moe", "deepseek_v3"])
def test_stacks_of_layers_and_experts_as_core_writes_them(tmp_path, name):
    source = CASES[name][0](name, tmp_path / "model")
    root = tmp_path / "megatron"
    root.mkdir()
    restack(root / "iter_0000003", source, padding=3)
    (root / "latest_checkpointed_iteration.txt").write_text("3\n")
    mcore_to_hf(root, tmp_path / "again", companions=source)
    assert_same(source, tmp_path / "again")


def into_core(path: Path, checkpoint: Path, layout: dict[str, int]) -> list[str]:
    """On one rank: megatron-core's own model from the checkpoint, beside an engine from the Hugging Face directory."""
    from quintet.engine import megatron_compat

    megatron_compat.install()
    from megatron.core import dist_checkpointing

    from quintet.engine.engine import Engine
    from quintet.engine.weights.shards import global_tensors
    from quintet.recipe import schema
    from tests.engine.checkpoint.core_model import core_model, sharded

    shape, cut = read_shape(path), schema.Layout(**layout)
    engine = Engine(shape, cut, engine=schema.Engine(), optimizer=None, dtype="fp32")
    engine.load_hf(path)
    model, mesh = core_model(shape, cut)
    content = dist_checkpointing.load_content_metadata(str(checkpoint))
    state = dist_checkpointing.load(
        sharded(model, mesh, content), str(checkpoint), validate_access_integrity=False
    )
    model.load_state_dict(state, strict=False)
    wanted = dict(global_tensors(engine.chunks[0], engine.mesh))
    found = {
        name.replace("local_experts.", ""): one
        for name, one in (*model.named_parameters(), *model.named_buffers())
    }
    rows = shape.vocab_size - mesh.at("tp") * wanted["embedding.word_embeddings.weight"].shape[0]
    wrong = []
    for name, one in wanted.items():
        real = slice(0, rows) if "word_embeddings" in name or "output_layer" in name else slice(None)
        if name not in found or not torch.equal(one[real], found[name][real]):
            wrong.append(name)
    return wrong


@pytest.mark.slow
def test_megatron_core_loads_it_into_its_own_model(pool, tmp_path):
    for name, converted, loaded in (
        ("qwen2-tied", {"pp": 2}, {"tp": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}, {"ep": 1}),
    ):
        path = CASES[name][0](name, tmp_path / name)
        hf_to_mcore(path, tmp_path / f"{name}-mcore", **converted)
        world = loaded.get("tp", 1)
        found = pool.run(into_core, world, path, tmp_path / f"{name}-mcore", loaded, timeout_s=600)
        assert found == [[]] * world


def trained(path: Path, out: Path) -> None:
    """On two ranks: an engine after an optimizer step, as a checkpoint and as a Hugging Face directory."""
    from quintet.data.batch import make_batch
    from quintet.engine.engine import Engine
    from quintet.recipe import schema

    engine = Engine(
        read_shape(path).without_mtp(),
        schema.Layout(pp=dist.get_world_size()),
        engine=schema.Engine(),
        optimizer=schema.Optimizer(lr=0.1, warmup_steps=0),
        dtype="fp32",
    )
    engine.load_hf(path)
    batch = make_batch([torch.arange(20) % 31], [1])
    engine.forward_backward(batch, [RankCell([0])], lambda outputs, fields: (-outputs.logprobs.sum(), {}))
    engine.optimizer_step()
    engine.save(out / "run" / "checkpoints" / "step-000001" / "policy")
    engine.save_hf(out / "exported", path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_moe"])
def test_a_runs_checkpoint_is_what_the_engine_would_export(pool, tmp_path, name):
    path = CASES[name][0](name, tmp_path / "model")
    pool.run(trained, 2, path, tmp_path, timeout_s=600)
    mcore_to_hf(tmp_path / "run" / "checkpoints" / "step-000001", tmp_path / "again", companions=path)
    assert_same(tmp_path / "exported", tmp_path / "again")
    assert not torch.equal(
        tensors(path)["model.embed_tokens.weight"], tensors(tmp_path / "again")["model.embed_tokens.weight"]
    )


def test_adapters_alone_are_no_model(converted):
    state = json.loads((converted / "state.json").read_text()) | {"adapters": {"base_path": "Qwen3-8B"}}
    written = json.dumps(state).encode()
    (converted / "state.json").write_bytes(written)
    sums = json.loads((converted / CHECKSUMS).read_text())
    sums["files"]["state.json"] = {"bytes": len(written), "crc32": zlib.crc32(written)}
    (converted / CHECKSUMS).write_text(json.dumps(sums))
    assert "holds adapters alone, beside the weights of Qwen3-8B" in refused(converted)


def evaluated(path: Path, checkpoint: Path) -> list[str]:
    """On one rank: an engine that loads the checkpoint beside one that reads the Hugging Face directory."""
    from quintet.engine.engine import Engine
    from quintet.recipe import schema

    def made(optimizer: schema.Optimizer | None = None) -> Engine:
        shape = read_shape(path)
        return Engine(shape, schema.Layout(), engine=schema.Engine(), optimizer=optimizer, dtype="fp32")

    first, second, training = made(), made(), made(schema.Optimizer())
    first.load_hf(path)
    second.load(checkpoint)
    training.load_hf(path)
    with pytest.raises(UserError, match="holds weights alone"):
        training.load(checkpoint)
    pairs = zip(first.shard_map(), second.shard_map(), strict=True)
    return [one.name for one, other in pairs if not torch.equal(one.view, other.view)]


@pytest.mark.slow
def test_an_engine_without_an_optimizer_loads_it(pool, tmp_path):
    path = models.save("qwen2-tied", tmp_path / "model")
    hf_to_mcore(path, tmp_path / "mcore", tp=2, pp=2)
    assert pool.run(evaluated, 1, path, tmp_path / "mcore", timeout_s=600) == [[]]


@pytest.fixture
def converted(tmp_path):
    path = models.save("qwen3", tmp_path / "model")
    hf_to_mcore(path, tmp_path / "mcore", tp=2)
    return tmp_path / "mcore"


def refused(source: Path, **options: Any) -> str:
    destination = source.parent / "refused"
    with pytest.raises(UserError) as caught:
        mcore_to_hf(source, destination, **options)
    assert not destination.exists()
    assert not list(source.parent.glob(".refused*"))
    return str(caught.value)


def test_what_does_not_fit_the_config_is_listed(converted):
    config = converted / "hf" / "config.json"
    whole = json.loads(config.read_text())
    for change, said in (
        ({"num_hidden_layers": 5}, "missing: decoder.layers.4.mlp.linear_fc1.layer_norm_weight"),
        ({"num_hidden_layers": 3}, "left over: decoder.layers.3.mlp.linear_fc1.layer_norm_weight"),
        ({"vocab_size": 1000}, "of another shape: embedding.word_embeddings.weight is "),
        ({"tie_word_embeddings": True}, "left over: output_layer.weight"),
        (
            {"num_key_value_heads": 2},
            "of another shape: decoder.layers.0.self_attention.linear_qkv.weight is ",
        ),
    ):
        config.write_text(json.dumps(whole | change))
        assert said in refused(converted)


def test_damaged_checkpoints(converted):
    file = converted / "__1_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert str(file) in refused(converted)
    half = len(whole) // 2
    file.write_bytes(whole[:half] + bytes([whole[half] ^ 4]) + whole[half + 1 :])
    assert str(file) in refused(converted)
    assert "is damaged" in refused(converted)
    file.unlink()
    assert f"{file} is missing" in refused(converted)
    (converted / ".metadata").write_bytes(pickle.dumps(print))
    (converted / CHECKSUMS).unlink()
    assert ".metadata is refused: it asks for builtins.print" in refused(converted)


def test_values_that_are_not_finite_are_refused_both_ways(tmp_path):
    path = models.save("qwen3", tmp_path / "model")
    broken = tensors(path)
    broken["model.norm.weight"][3] = math.nan
    save_file(broken, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight holds values that are not finite"):
        hf_to_mcore(path, tmp_path / "mcore")
    assert not (tmp_path / "mcore").exists()
    assert not list(tmp_path.glob(".mcore*"))


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("qwen3", {"tp": 3}, "--tp=3 does not divide the model's 8 attention heads"),
        ("qwen3", {"pp": 3}, "--pp=3 does not divide the model's 4 layers"),
        ("qwen3", {"vpp": 2}, "--vpp=2 needs --pp > 1"),
        ("qwen3", {"ep": 2}, "--ep=2: the model has no experts"),
        ("qwen3", {"tp": 0}, "--tp=0: input should be greater than 0"),
        ("qwen3_moe", {"ep": 3}, "--ep=3 does not divide the model's 8 experts"),
        ("qwen3", {"dtype": "int8"}, "dtype int8: expected one of fp32, bf16, fp16"),
    ],
    ids=str,
)
def test_layouts_that_do_not_divide(tmp_path, name, layout, said):
    path = CASES[name][0](name, tmp_path / "model")
    with pytest.raises(UserError) as caught:
        hf_to_mcore(path, tmp_path / "mcore", **layout)
    assert said in str(caught.value)


def test_what_is_there_already_stays(converted):
    before = sorted(converted.iterdir())
    with pytest.raises(UserError, match="is there already"):
        hf_to_mcore(converted.parent / "model", converted)
    assert sorted(converted.iterdir()) == before
    with pytest.raises(UserError, match="is there already"):
        mcore_to_hf(converted, converted.parent / "model")


def test_where_a_checkpoint_is_looked_for(converted, tmp_path):
    step = tmp_path / "run" / "checkpoints" / "step-000012"
    step.mkdir(parents=True)
    shutil.copytree(converted, step / "policy")
    mcore_to_hf(step, tmp_path / "again")
    assert_same(tmp_path / "model", tmp_path / "again")
    shutil.rmtree(step / "policy" / "hf")
    assert "name a Hugging Face directory with its config.json, by --hf" in refused(step)
    (tmp_path / "run" / "recipe.yaml").write_text(f"model:\n  path: {tmp_path / 'model'}\n")
    mcore_to_hf(step, tmp_path / "once-more")
    assert_same(tmp_path / "model", tmp_path / "once-more")
    assert "is not a checkpoint" in refused(tmp_path / "model")
    assert "does not exist" in refused(tmp_path / "nowhere")


def test_sources_that_do_not_say_what_is_needed(converted, tmp_path):
    for source in (tmp_path / "nowhere", converted):
        with pytest.raises(UserError, match="is not a Hugging Face directory: there is no config"):
            hf_to_mcore(source, tmp_path / "out")
    assert f"--hf {tmp_path}: there is no config.json" in refused(converted, companions=tmp_path)
    (converted / CHECKSUMS).unlink()
    assert f"{converted / CHECKSUMS} is missing" in refused(converted)


def test_the_optimizer_of_a_chain_is_passed_over(tmp_path):
    source = models.save("qwen3", tmp_path / "model")
    restack(tmp_path / "mcore", source, beside=("optimizer.a", "chained_1.optimizer.state.exp_avg.b"))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "again", companions=source)
    assert_same(source, tmp_path / "again")
    restack(tmp_path / "more", source, beside=("chained_1.other",))
    assert "left over: chained_1.other" in refused(tmp_path / "more", companions=source)


def test_no_written_piece_is_larger_than_said(tmp_path, monkeypatch):
    path = models.save("qwen3", tmp_path / "model")
    monkeypatch.setattr(parts, "PIECE_BYTES", 4096)
    assert_same(path, there_and_back(path, tmp_path, tp=2))
    stored = Reader(tmp_path / "mcore").tensors["embedding.word_embeddings.weight"]
    row = stored.shape[1] * 4
    assert (
        max((stop - start) * row for (start, stop), _ in (one.box for one in stored.chunks))
        == 4096 // row * row
    )


def test_the_command(tmp_path, capsys):
    models.save("qwen2-tied", tmp_path / "model")
    where = [str(tmp_path / name) for name in ("model", "mcore", "again")]
    assert main(["convert", "hf-to-mcore", *where[:2], "--tp", "2", "--pp", "2"]) == 0
    assert f"{where[1]}: 34 tensors, 0.5 MB in " in capsys.readouterr().out
    assert main(["convert", "mcore-to-hf", *where[1:]]) == 0
    assert_same(tmp_path / "model", tmp_path / "again")
    assert main(["convert", "mcore-to-hf", *where[1:]]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["convert", "hf-to-mcore", where[0], str(tmp_path / "x"), "--family", "no.py:Mine"]) == 2
    for bad in (["hf-to-mcore", where[0]], ["mcore-to-hf", *where[:2], "--tp", "2"], ["sideways"], []):
        with pytest.raises(SystemExit) as caught:
            main(["convert", *bad])
        assert caught.value.code == 2


def test_a_family_of_the_users_own(tmp_path, families_forgotten):
    from tests.models.directory import QWEN3, shapes_of

    file = tmp_path / "mine.py"
    file.write_text(
        "from quintet.models import Family, dense_shape\n"
        "class Mine(Family):\n    name = 'mine'\n    architectures = ('MineForCausalLM',)\n"
        "    def shape(self, config):\n        return dense_shape(config, 'mine', qk_norm=True, qkv_bias=False, "
        "tied_by_default=False)\n"
    )
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN3 | {"architectures": ["MineForCausalLM"]}))
    weights = {name: torch.randn(shape) for name, shape in shapes_of(QWEN3).items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    family = ["--family", f"{file}:Mine"]
    assert main(["convert", "hf-to-mcore", str(path), str(tmp_path / "mcore"), *family]) == 0
    assert main(["convert", "mcore-to-hf", str(tmp_path / "mcore"), str(tmp_path / "again"), *family]) == 0
    assert_same(path, tmp_path / "again")


def test_parts_of_a_checkpoint_are_the_parts_of_the_model(converted):
    """What one rank's file holds is that rank's rows, not only what makes up the whole."""
    reader = Reader(converted)
    for key in (
        "decoder.layers.2.self_attention.linear_qkv.weight",
        "decoder.layers.1.mlp.linear_fc1.weight_w",
    ):
        chunks = {chunk.file: chunk for chunk in reader.tensors[key].chunks}
        assert set(chunks) == {"__0_0.distcp", "__1_0.distcp"}
        full = reader.read_box(key, whole_box(reader.tensors[key].shape))
        for chunk in chunks.values():
            whole = whole_box(full.shape)
            assert torch.equal(reader.read(chunk), within(full, whole, chunk.box))
