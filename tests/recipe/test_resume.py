"""What a resumed run may change."""

from __future__ import annotations

import pytest

from quintet.recipe.keys import all_keys, leaf_keys
from quintet.recipe.resume import MAY_CHANGE, MAY_NOT, WARM_UP_LENGTH, changed_keys, may_change

FREE = [
    "layout.tp=2 cluster.ranks=2",
    "engine.tokens_per_microbatch_per_rank=4096",
    "train.steps=7",
    "run.name=other",
    "run.trackers=[tensorboard]",
    "checkpoint.every_steps=3",
    "checkpoint.every_steps=3 resume=auto",
    "rollout.layout={tp: 1}",
    "train.eval_prompts=3",
]
FIXED = {
    "optimizer.lr=2e-6": [("optimizer.lr", 1e-6, 2e-6)],
    "run.seed=1": [("run.seed", 0, 1)],
    "model.build.layers=2": [("model.build.layers", 4, 2)],
    "data.task_options={digits: 2}": [("data.task_options", {}, {"digits": 2})],
    "rollout.temperature=0.5": [("rollout.temperature", 1.0, 0.5)],
    "algorithm.kl_coef=0.1": [("algorithm.kl_coef", 0.0, 0.1)],
    "reward.function=length": [("reward.function", "math", "length")],
    "train.prompts_per_step=32": [("train.prompts_per_step", 64, 32)],
    "engine.megatron.layernorm_epsilon=1.0e-5": [("engine.megatron", {}, {"layernorm_epsilon": 1e-5})],
}


OF_EXPERTS = {
    "engine.aux_loss.weight=0.1": [("engine.aux_loss", None, {"per": "sequence", "weight": 0.1})],
    "engine.z_loss=0.1": [("engine.z_loss", 0.0, 0.1)],
    "engine.replay_routes=rollout rollout.return_routes=true": [("engine.replay_routes", None, "rollout")],
}


@pytest.mark.parametrize("override", OF_EXPERTS)
def test_what_routers_learn_may_not(load, override):
    moe = "model.build.family=qwen3_moe"
    then, now = load(moe).model_dump(mode="json"), load(moe, *_split(override))
    assert changed_keys(then, now, "rl") == OF_EXPERTS[override]
    if "aux_loss" in override:
        other = load(moe, "engine.aux_loss.weight=0.2")
        assert [key for key, *_ in changed_keys(now.model_dump(mode="json"), other, "rl")] == [
            "engine.aux_loss.weight"
        ]


@pytest.mark.parametrize("stage", ["sft", "rl"])
@pytest.mark.parametrize("overrides", FREE)
def test_where_and_how_long_may_change(load, overrides, stage):
    then, now = load(), load(*_split(overrides))
    assert changed_keys(then.model_dump(mode="json"), now, stage) == []


@pytest.mark.parametrize("override", [one for one in FIXED if "megatron" not in one])
def test_what_is_learnt_may_not(load, override):
    then, now = load(), load(override)
    assert changed_keys(then.model_dump(mode="json"), now, "rl") == FIXED[override]


def test_fields_of_megatron_may_not(load):
    now = load()
    now.engine.megatron["layernorm_epsilon"] = 1e-5
    assert [key for key, *_ in changed_keys(load().model_dump(mode="json"), now, "rl")] == ["engine.megatron"]


def test_the_length_of_a_warm_up_may_change_until_it_is_over(load):
    then, now = load("sft.steps=5").model_dump(mode="json"), load("sft.steps=9", "sft.stop_at_loss=0.5")
    assert changed_keys(then, now, "sft") == []
    assert [key for key, *_ in changed_keys(then, now, "rl")] == ["sft.steps", "sft.stop_at_loss"]


def test_a_section_that_comes_is_one_change(load):
    then, now = load().model_dump(mode="json"), load("sft={}")
    assert [(key, old) for key, old, _ in changed_keys(then, now, "rl")] == [("sft", None)]


def test_how_adapters_travel_may_change(load):
    then = load("lora={rank: 4}").model_dump(mode="json")
    then["rollout"]["adapter_sync"] = "separate"  # as of vLLM
    assert changed_keys(then, load("lora={rank: 4}"), "rl") == []


def test_a_key_that_did_not_exist_counts_as_its_default(load):
    then = load().model_dump(mode="json")
    del then["algorithm"]["kl_coef"], then["data"]
    now = load()
    assert changed_keys(then, now, "rl") == [("data.task", "jsonl", "addition")]
    now.algorithm.kl_coef = 0.5
    assert ("algorithm.kl_coef", 0.0, 0.5) in changed_keys(then, now, "rl")


def test_every_listed_key_exists_and_models_data_and_algorithms_are_not_among_them():
    assert {*MAY_CHANGE, *MAY_NOT, *WARM_UP_LENGTH} <= set(all_keys())
    free = {key for key in leaf_keys() if may_change(key, "rl")}
    assert {key.partition(".")[0] for key in leaf_keys()} - {key.partition(".")[0] for key in free} >= {
        "data",
        "algorithm",
    }
    assert "reward.function" not in free
    assert not [
        key for key in free if key.startswith(("model.", "sft.")) and key not in ("model.dtype", *MAY_CHANGE)
    ]


def _split(overrides: str) -> list[str]:
    return [overrides] if "{" in overrides else overrides.split()
