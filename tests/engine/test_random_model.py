"""Models that are made: what is on the disk then, and that an ordinary directory with new layers comes of one without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quintet.engine.weights.random_model import write_fresh_model, write_with_fresh_layers
from quintet.models import check_weights, held_shape, read_shape
from quintet.models.weights_on_disk import find_weights
from quintet.recipe.rules.facts import shape_of_built
from quintet.recipe.schema import BuildModel
from tests.engine import moe_models
from tests.engine.test_mtp import in_two_files

IDS = {"vocab_size": 31, "eos_id": 1, "pad_id": 0, "seed": 0}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mimo"])
def test_a_built_model_is_what_the_rules_took_it_for(tmp_path: Path, family) -> None:
    build = BuildModel(family=family, layers=2, hidden_size=32, heads=2, kv_heads=1, head_dim=16)
    write_fresh_model(build, tmp_path / "m", **IDS, mtp_layers=2 if family == "mimo" else None)
    shape = read_shape(tmp_path / "m")
    check_weights(tmp_path / "m", shape)
    assert shape.mtp_layers == 2 * (family == "mimo")
    told = shape_of_built(build)
    assert replace(told, vocab_size=31) == replace(shape.without_mtp(), rope=told.rope)
    tensors = moe_models.stored(tmp_path / "m")
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            assert not tensor.any()
        elif tensor.dim() == 1:
            assert (tensor == 1).all()
        else:
            assert 0.015 < tensor.std() < 0.025


@pytest.mark.parametrize("files", [1, 2])
def test_a_model_gets_new_layers_beside_its_own_tensors(tmp_path: Path, files) -> None:
    source = moe_models.save("deepseek_v3", tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    if files == 2:
        source = in_two_files(source, tmp_path / "two")
    write_with_fresh_layers(source, tmp_path / "out", 2, seed=0)
    shape = held_shape(tmp_path / "out")
    check_weights(tmp_path / "out", shape)
    assert shape == read_shape(tmp_path / "out")
    assert shape.without_mtp() == read_shape(source).without_mtp()
    assert shape.mtp_layers == 2
    before, after = (find_weights(path).tensors for path in (source, tmp_path / "out"))
    assert before.keys() < after.keys()
    assert all(after[name].file.resolve() == one.file.resolve() for name, one in before.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file() == (source / "tokenizer.json").is_file()
    bias = moe_models.stored(tmp_path / "out")["model.layers.4.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert not bias.any()


@pytest.mark.parametrize("said", ["dtype", "torch_dtype", None])
def test_new_layers_have_the_models_type_and_not_that_of_its_first_matrix(tmp_path: Path, said) -> None:
    source = moe_models.save("deepseek_v3", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (source / "config.json").write_text(json.dumps(config | ({said: "bfloat16"} if said else {})))
    tensors = {
        name: one.float() if name in ("lm_head.weight", "model.embed_tokens.weight") else one.bfloat16()
        for name, one in moe_models.stored(source).items()
    }
    save_file(tensors, str(source / "model.safetensors"), metadata={"format": "pt"})
    write_with_fresh_layers(source, tmp_path / "out", 1, seed=0)
    new = {n: t for n, t in moe_models.stored(tmp_path / "out").items() if n not in tensors}
    assert {t.dtype for n, t in new.items() if not n.endswith("correction_bias")} == {torch.bfloat16}
