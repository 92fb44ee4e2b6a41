"""The section `mtp`: which layers a recipe means, and what is said where there are none."""

from __future__ import annotations

import pytest

from quintet.recipe.mtp import depths
from quintet.recipe.rules import shape_of
from tests.models.directory import DEEPSEEK_V3, write_model

MIMO = ("model.build.family=mimo", "model.build.tied_embeddings=false")


@pytest.fixture
def ahead(tmp_path) -> list[str]:
    """Overrides that name a model with two layers for multi-token prediction."""
    directory = write_model(tmp_path / "model", DEEPSEEK_V3 | {"num_nextn_predict_layers": 2})
    (directory / "tokenizer.json").touch()
    return ["model.build=null", f"model.path={directory}"]


def test_layers_are_loaded_where_the_section_is_there_and_trained_where_it_says_so(load, ahead) -> None:
    for overrides, held, trained in (
        ([], 0, 0),
        (["mtp={}"], 2, 2),
        (["mtp.train=false"], 2, 0),
    ):
        recipe = load(*ahead, *overrides)
        shape = shape_of(recipe)
        assert shape is not None
        assert (shape.mtp_layers, depths(recipe, shape)) == (held, trained)


def test_a_built_model_and_one_without_layers_get_new_ones(load, models) -> None:
    for overrides in (MIMO, models["mla"]):
        shape = shape_of(load(*overrides, "mtp.init_layers=2"))
        assert shape is not None
        assert shape.mtp_layers == 2


def test_layers_that_are_not_there_are_refused(refuse, models, ahead) -> None:
    none = "mtp: no layers for multi-token prediction are known of the family qwen3; models of deepseek_v3, glm4_moe, mimo"
    assert none in refuse("mtp={}")
    assert none in refuse(*models["dense"], "mtp.init_layers=1")
    assert "set mtp.init_layers to give it new ones, or mtp=null" in refuse(*models["mla"], "mtp={}")
    assert "set mtp.init_layers to give it new ones, or mtp=null" in refuse(*MIMO, "mtp={}")
    assert "mtp.init_layers=1: the model has layers for multi-token prediction already (2)" in refuse(
        *ahead, "mtp.init_layers=1"
    )


@pytest.mark.parametrize(
    "key", ["loss_weight=0.2", "detach=false", "loss=self_distill", "clip_grad_norm=null"]
)
def test_keys_of_training_are_not_read_by_layers_that_are_not_trained(refuse, key) -> None:
    said = refuse(*MIMO, "mtp.init_layers=1", "mtp.train=false", f"mtp.{key}")
    assert f"mtp.{key} is not read with mtp.train=false" in said


def test_patterns_are_of_layers_that_are_trained(load, refuse) -> None:
    """Of those that are kept, an engine would say so only once it is there; the embedding beside them is trained, on its stage too."""
    kept = [
        *MIMO,
        "mtp.init_layers=1",
        "mtp.train=false",
        "cluster.ranks=2",
        "layout.pp=2",
        "rollout.layout.tp=1",
    ]
    for key, pattern in (("frozen", "[model.mtp_layers.*]"), ("lr_multipliers", "{model.mtp_layers.*: 2}")):
        assert "'model.mtp_layers.*'" in refuse(*kept, f"optimizer.{key}={pattern}")
        load(*MIMO, "mtp.init_layers=1", f"optimizer.{key}={pattern}")
    last = "'model.layers.[23].*', model.norm.weight, lm_head.weight"
    load(*kept, f"optimizer.frozen=[{last}]")
    said = refuse(*kept, f"optimizer.frozen=[{last}, model.embed_tokens.weight]")
    assert "optimizer.frozen leaves pipeline stage 1 (of 0 to 1) no weight" in said


def test_an_engine_that_may_not_know_their_weights_is_refused(refuse) -> None:
    said = refuse(*MIMO, "mtp.init_layers=1", "rollout.backend=sglang", "cluster.device=cuda")
    assert "rollout.backend=sglang with mtp" in said


VERL = {
    "enable=true": "mtp={}",
    "enable_train=true": "mtp.train",
    "mtp_loss_scaling_factor=0.1": "mtp.loss_weight",
    "detach_encoder=true": "mtp.detach",
    "enable_rollout=true": "rollout.draft_tokens",
    "method=mtp": "rollout.draft_tokens",
    "num_speculative_tokens=1": "rollout.draft_tokens",
    "speculative_algorithm=EAGLE": "rollout.draft_tokens",
    "speculative_num_steps=2": "rollout.draft_tokens",
    "speculative_eagle_topk=1": "rollout.draft_tokens",
    "speculative_num_draft_tokens=2": "rollout.draft_tokens",
}


@pytest.mark.parametrize("where", ["mtp", "actor_rollout_ref.model.mtp"])
@pytest.mark.parametrize("key", VERL)
def test_names_of_others_are_hints(refuse, where, key) -> None:
    said = refuse(*MIMO, "mtp.init_layers=1", f"{where}.{key}")
    assert f"unknown key {where}.{key.partition('=')[0]}; in quintet it is {VERL[key]}" in said


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("mtp.enabled=true", "mtp={}"),
        ("mtp.num_nextn_predict_layers=1", "mtp.init_layers"),
        ("rollout.speculative_config.method=mtp", "rollout.draft_tokens"),
    ],
)
def test_other_names_are_hints_too(refuse, key, ours) -> None:
    said = refuse(*MIMO, "mtp.init_layers=1", key)
    assert f"unknown key {key.partition('=')[0]}; in quintet it is {ours}" in said


def test_what_a_hint_says_of_verls_switch_is_a_setting(load) -> None:
    assert load(*MIMO, "mtp={}", "mtp.init_layers=1").mtp.train
