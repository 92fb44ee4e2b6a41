"""The tables of features, refused pairs and megatron-core's fields."""

import ast
from pathlib import Path

from quintet.recipe.features import FEATURES
from quintet.recipe.keys import all_keys
from quintet.recipe.megatron import _REFUSED, FREE, transformer_config_fields
from quintet.recipe.refused import NEEDS_GPU, NOT_AVAILABLE, REFUSED_PAIRS
from quintet.recipe.rules import shape_of
from tests.recipe.broken_engine import BROKEN_ENGINE, OWN, named
from tests.recipe.broken_fp8 import BROKEN_FP8
from tests.recipe.broken_rollout import BROKEN_ROLLOUT
from tests.recipe.feature_sets import features_on, refused_pair


def test_features_name_their_keys() -> None:
    features = [*FEATURES.values(), *(feature for feature, _ in NOT_AVAILABLE)]
    assert {key for one in features for key in one.keys} <= set(all_keys())
    assert {need for one in features for need in one.needs} <= FEATURES.keys()
    assert {need.feature for need in NEEDS_GPU} <= FEATURES.keys()


def test_every_refused_pair_is_of_two_features_and_is_refused(refuse, models) -> None:
    """Both ways round, by a sentence that names both keys; and a recipe of those tables has each."""
    refused = "\n".join(
        refuse(*named(overrides, models))
        for rule, overrides, _ in [*BROKEN_ENGINE, *BROKEN_FP8, *BROKEN_ROLLOUT]
        if rule == "features_go_together"
    )
    for pair in REFUSED_PAIRS:
        a, b = FEATURES[pair.first], FEATURES[pair.second]
        sentence = refused_pair(a.id, b.id)
        assert sentence == refused_pair(b.id, a.id) == pair.sentence()
        assert a.key in sentence
        assert b.key in sentence
        assert f"{a.key} ({a.name}) does not go with {b.key} ({b.name}): " in refused
    assert refused_pair("tp", "pp") is None
    assert refused_pair("tp", "tp") is None
    assert "two values of engine.recompute" in str(refused_pair("recompute_full", "recompute_selective"))


def test_features_are_told_from_a_recipe(load, models) -> None:
    assert features_on(load()) == {"distributed_optimizer", "shared_rollout"}
    assert {"tied"} < features_on(load(), shape_of(load()))
    recipe = load(*models["moe"], "cluster.ranks=4", "layout.tp=2", "layout.sp=true", OWN, "model.dtype=bf16")
    assert features_on(recipe, shape_of(recipe)) == {
        *("dp", "tp", "sp", "etp", "experts", "bf16", "distributed_optimizer", "own_rollout")
    }


def test_fields_of_megatron_core_that_are_named_are_there() -> None:
    assert transformer_config_fields() > _REFUSED.keys() | FREE
    assert not _REFUSED.keys() & FREE


def test_engine_megatron_cannot_set_what_the_engine_sets() -> None:
    """Read from the source: the engine's module takes seconds to import."""
    source = Path(__file__).parents[2] / "quintet" / "engine" / "config.py"
    tables = [
        node.value
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict)
    ]
    set_by_engine = {ast.literal_eval(key) for table in tables for key in table.keys if key is not None}
    assert {"num_layers", "recompute_granularity", "kv_lora_rank", "overlap_p2p_comm"} < set_by_engine
    assert not set_by_engine & FREE
