"""Hugging Face directories: bad ones are refused by name, good ones go round and come back the same."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from quintet.engine.weights.hf import GATHERED_BYTES, check_hf
from quintet.engine.weights.hf_aux_files import write_companions
from quintet.engine.weights.hf_write import SHARD_BYTES
from quintet.engine.weights.reshard import Resharder
from quintet.errors import UserError
from quintet.models import read_shape
from tests.engine import moe_models
from tests.models.directory import QWEN3, shapes_of, write_model
from tests.oracle.reference import save


@pytest.fixture
def path(tmp_path):
    return save("qwen3", tmp_path / "model")


def rewrite(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_missing_and_left_over_tensors_are_listed(path):
    rewrite(path, lambda t: t.update(stray=torch.ones(1)) or t.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"missing: model.norm.weight; left over: stray"):
        check_hf(read_shape(path), path)


def test_a_truncated_file_is_named(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        check_hf(read_shape(path), path)


def test_no_weights_at_all(path):
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        check_hf(read_shape(path), path)


def round_trip(path: Path, out: Path, layout: dict, shard_bytes: int, dtype: str = "fp32") -> None:
    from quintet.engine.engine import Engine
    from quintet.engine.weights import hf, hf_write
    from quintet.recipe import schema

    hf_write.SHARD_BYTES = hf.GATHERED_BYTES = shard_bytes
    engine = Engine(
        read_shape(path), schema.Layout(**layout), engine=schema.Engine(), optimizer=None, dtype=dtype
    )
    engine.load_hf(path)
    engine.save_hf(out, path)
    hf_write.SHARD_BYTES, hf.GATHERED_BYTES = SHARD_BYTES, GATHERED_BYTES


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "qwen2", "llama", "mimo"])
@pytest.mark.parametrize(
    ("world", "layout"), [(1, {}), (2, {"tp": 2}), pytest.param(4, {"pp": 2}, marks=pytest.mark.slow)]
)
def test_saved_equals_loaded(pool, tmp_path, family, world, layout):
    path = save(family, tmp_path / "in")
    pool.run(round_trip, world, path, tmp_path / "out", layout, SHARD_BYTES)
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


EXPERTS: list[tuple[int, dict]] = [
    (2, {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
    (4, {"pp": 2, "vpp": 2, "ep": 2}),
    (1, {}),
    (2, {"ep": 2}),
    (2, {"etp": 2}),
]
OF_FAMILIES = [
    (family, *layout)
    for family in moe_models.FAMILIES
    for layout in (EXPERTS if family in ("qwen3_moe", "deepseek_v3") else EXPERTS[:2])
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world", "layout"), OF_FAMILIES, ids=str)
def test_experts_go_round(pool, tmp_path, family, world, layout):
    path = moe_models.save(family, tmp_path / "in")
    pool.run(round_trip, world, path, tmp_path / "out", layout, SHARD_BYTES)
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, {}),
        pytest.param(4, {"ep": 2, "etp": 2}, marks=pytest.mark.slow),
        (4, {"pp": 2, "etp": 2}),
    ],
    ids=str,
)
def test_tensors_of_all_experts_go_round(pool, tmp_path, world, layout):
    """gpt-oss has all experts of a layer in one tensor, gate and up in turns; ranks hold parts of it."""
    path = save("gpt_oss", tmp_path / "in")
    pool.run(round_trip, world, path, tmp_path / "out", layout, SHARD_BYTES)
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_transformers_computes_the_same_from_what_expert_ranks_saved(pool, tmp_path, family):
    from transformers import AutoModelForCausalLM

    path = moe_models.save(family, tmp_path / "in")
    pool.run(round_trip, 2, path, tmp_path / "out", {"ep": 2}, 40_000)
    ids = torch.arange(20)[None] % moe_models.VOCAB
    first, second = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (path, tmp_path / "out")
    )
    assert torch.equal(first(input_ids=ids).logits, second(input_ids=ids).logits)


@pytest.mark.parametrize("layout", [{"ep": 2}, {"pp": 2}], ids=str)
def test_the_expert_bias_keeps_its_bits_in_a_bf16_model(pool, tmp_path, layout):
    """On its way from another stage, too."""
    path = moe_models.save("deepseek_v3", tmp_path / "in")
    pool.run(round_trip, 2, path, tmp_path / "out", layout, SHARD_BYTES, "bf16")
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in before:
        is_bias = name.endswith("e_score_correction_bias")
        assert after[name].dtype == (torch.float32 if is_bias else torch.bfloat16)
        assert torch.equal(after[name], before[name].to(after[name].dtype))


def test_sharded_files_and_transformers(pool, tmp_path):
    from transformers import AutoModelForCausalLM

    path = save("qwen3", tmp_path / "in")
    first, second = tmp_path / "first", tmp_path / "second"
    pool.run(round_trip, 1, path, first, {}, 40_000)
    index = json.loads((first / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    pool.run(round_trip, 2, first, second, {"tp": 2}, SHARD_BYTES)  # and read back from many files
    model = AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32)
    want = load_file(path / "model.safetensors")
    state = model.state_dict()
    assert all(torch.equal(state[name], want[name]) for name in want)


def saved_in_parts(path: Path, out: Path) -> list[int]:
    """On each of two stages: bytes that came to it at a time."""
    from quintet.engine.engine import Engine
    from quintet.engine.weights import hf
    from quintet.recipe import schema

    engine = Engine(
        read_shape(path), schema.Layout(pp=2), engine=schema.Engine(), optimizer=None, dtype="fp32"
    )
    engine.load_hf(path)
    came = []

    def resharder(sources, targets, **how):
        came.append(sum(one.view.nbytes for one in targets))
        return Resharder(sources, targets, bucket_mib=1, **how)

    with mock.patch.multiple(hf, Resharder=resharder, GATHERED_BYTES=2 << 20):
        engine.save_hf(out, path, "its own template")
    return came


def test_large_tensors_of_another_stage_come_in_parts_that_their_views_have(pool, tmp_path):
    """Of 1.5 MiB in two groups of heads, where 1 MiB travels at a time."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 24, "head_dim": 64}
    config = QWEN3 | sizes | {"tie_word_embeddings": False}
    path = write_model(tmp_path / "in", config)
    (path / "model.safetensors").unlink()
    save_file({name: torch.randn(one) for name, one in shapes_of(config).items()}, path / "model.safetensors")
    first, second = pool.run(saved_in_parts, 2, path, tmp_path / "out")
    assert 1.5 * 2**20 < max(first) <= 2 * 2**20
    assert second == [0] * len(first)
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "its own template"


def test_unknown_architectures_name_the_known(path):
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"MambaForCausalLM is not supported; supported are .*Qwen3ForCausalLM"
    ):
        read_shape(path)


def test_a_chat_template_takes_the_place_of_any_other(tmp_path):
    from quintet.data.chat_template import own_template
    from quintet.data.tokenizer import build_char_tokenizer, load_tokenizer

    build_char_tokenizer("abc", tmp_path / "in")
    (tmp_path / "in" / "chat_template.jinja").unlink()
    file = tmp_path / "in" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "another"}))
    (tmp_path / "out").mkdir()
    write_companions(tmp_path / "out", tmp_path / "in", {}, "{{ messages }} é")
    assert load_tokenizer(tmp_path / "out").chat_template == "{{ messages }} é"
    assert own_template(tmp_path / "out").text == "{{ messages }} é"
    assert "another" not in (tmp_path / "out" / "tokenizer_config.json").read_text()
    (tmp_path / "as it was").mkdir()
    write_companions(tmp_path / "as it was", tmp_path / "in", {})
    assert own_template(tmp_path / "as it was").text == "another"
