"""What vLLM is asked for at the edges: what it can just do is not refused, and what it just cannot is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quintet.recipe.schema import Recipe
from quintet.recipe.told import told
from quintet.recipe.vllm import (
    MOST_DRAFTED,
    RUNNER,
    draft_lengths,
    drafts_refused,
    refusals,
    runner_refusals,
    runner_taken,
)
from tests.models.directory import DEEPSEEK_V3, GPT_OSS, write_model
from tests.recipe.broken_engine import named

V = "rollout.backend=vllm"
NGRAM = {"speculative_config": {"method": "ngram"}}


def recipe_of(device: str = "cuda", **rollout: Any) -> Recipe:
    return Recipe.model_validate({"cluster": {"device": device}, "rollout": {"backend": "vllm"} | rollout})


def said(**rollout: Any) -> str:
    return "\n".join(problem.message for problem in refusals(recipe_of(**rollout).rollout))


@pytest.mark.parametrize(
    "rollout",
    [
        {"temperature": 0, "top_p": 0.9, "top_k": 5},
        {"temperature": 0.7, "top_p": 1, "top_k": 0, "min_p": 0},
        {"min_p": 0.1, "top_k": 5},
        {"temperature": 0, "vllm": NGRAM},
        {"vllm": {"speculative_config": {"method": "ngram_gpu"}}},
        {"vllm": {"speculative_config": {"method": "suffix"}}},
        {"layout": {"pp": 2}, "vllm": {"async_scheduling": True}},
        {"layout": {"pp": 4}},
        {"layout": {"pp": 4}, "vllm": {"async_scheduling": False}},
        {"layout": {"tp": 4, "ep": 4}},
        {"vllm": {"load_format": "auto", "hf_overrides": {"rope_theta": 2}}},
    ],
    ids=str,
)
def test_what_it_can_do_is_not_refused(rollout: dict[str, Any]) -> None:
    assert said(**rollout) == ""


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"temperature": 0.7, "min_p": 0.1}, "rollout.min_p=0.1 with rollout.temperature=0.7"),
        ({"min_p": 0.1, "top_p": 0.99}, "rollout.min_p=0.1 with rollout.top_p=0.99"),
        (
            {"layout": {"pp": 3}, "vllm": {"async_scheduling": True}},
            "async_scheduling with rollout.layout.pp=3",
        ),
        ({"layout": {"tp": 1, "ep": 2}}, "tensor-parallel ranks; use ep=1, or another rollout.layout.tp"),
        ({"vllm": {"speculative_config": "ngram"}}, "speculative_config with method=null"),
        ({"vllm": {"speculative_config": {}}}, "speculative_config with method=null"),
    ],
    ids=str,
)
def test_what_it_just_cannot_do_is_refused(rollout: dict[str, Any], words: str) -> None:
    assert words in said(**rollout)


def test_overrides_that_are_no_mapping_are_left_to_vllm() -> None:
    assert said(vllm={"hf_overrides": 5}) == ""


def test_the_second_runner_is_taken_for_routes_on_gpus_alone() -> None:
    asked = {"return_routes": True, "vllm": {"async_scheduling": False}}
    assert list(runner_refusals(recipe_of("cpu", **asked), None)) == []
    assert len(list(runner_refusals(recipe_of(**asked), None))) == 1


def test_the_runner_that_is_asked_for_is_taken_whatever_it_lacks() -> None:
    taken, line = runner_taken(recipe_of(vllm=NGRAM), "1")
    assert taken == "1"
    assert line == (
        f"vLLM on GPUs: the second model runner, the faster: {RUNNER}=1 in the environment; the second lacks "
        "rollout.vllm.speculative_config"
    )
    assert runner_taken(recipe_of(), "0")[1].endswith(f"the slower: {RUNNER}=0 in the environment")


def test_greedy_with_merged_adapters_may_draft() -> None:
    assert list(drafts_refused(recipe_of(temperature=0, adapter_sync="merged"))) == []


def test_drafts_are_as_long_as_layers_or_a_multiple() -> None:
    assert draft_lengths(0) == []
    assert draft_lengths(1) == list(range(1, MOST_DRAFTED + 1))
    assert draft_lengths(3) == [1, 2, 3, 6]


@pytest.mark.parametrize(
    "overrides",
    [
        ["@moe", "cluster.device=cuda", "cluster.ranks=2", "rollout.layout={tp: 2, ep: 2}"],
        ["cluster.device=cuda", "rollout.vllm.enable_chunked_prefill=true"],
        ["cluster.device=cpu", "rollout.vllm.enable_chunked_prefill=false"],
    ],
    ids=str,
)
def test_what_it_lacks_on_one_device_is_not_refused_on_the_other(load, models, overrides: list[str]) -> None:
    load(V, *named(overrides, models))


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Makes a directory of a config; overrides that name it."""

    def made(config: dict[str, Any]) -> list[str]:
        path = write_model(tmp_path / f"model{len(list(tmp_path.iterdir()))}", config)
        (path / "tokenizer.json").touch()
        return ["model.build=null", f"model.path={path}"]

    return made


@pytest.mark.parametrize(
    "other",
    [
        {"swiglu_alpha": 1.5},
        {"swiglu_limit": 6.0},
        {"rms_norm_eps": 1e-6},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ],
    ids=str,
)
def test_a_gpt_oss_is_taken_where_it_is_the_one_that_vllm_knows(load, refuse, model, other) -> None:
    sound = GPT_OSS | {"max_position_embeddings": 2048}
    load(V, *model(sound))
    said = refuse(V, *model(sound | other))
    assert "swiglu_limit=7, rms_norm_eps=1e-5 and a window in every second layer" in said


def test_a_first_start_in_eight_bits_is_told_to_be_long() -> None:
    def long(**rollout: Any) -> bool:
        return any("compiles kernels" in line for line in told(recipe_of(**rollout), "train"))

    assert long(quantization="fp8")
    assert not long()
    assert not long(device="cpu", quantization="fp8")


def test_experts_of_one_tensor_are_not_quantised(refuse, model) -> None:
    whole = {"hidden_size": 128, "head_dim": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
    said = refuse(V, "rollout.quantization=fp8", *model(GPT_OSS | whole | {"intermediate_size": 128}))
    assert "gpt_oss has all experts of a layer in one tensor" in said


def test_a_deepseek_v3_that_names_its_routing_is_taken(load, model) -> None:
    load(V, *model(DEEPSEEK_V3 | {"topk_method": "noaux_tc"}))
