"""The support table of docs/rollout.md says "tested" only where a test is, and "refused" only where a recipe is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quintet.recipe.refused import NOT_AVAILABLE
from quintet.recipe.schema import Recipe
from quintet.recipe.sglang import refusals as sglang_refusals
from quintet.recipe.vllm import refusals as vllm_refusals

ROOT = Path(__file__).parents[2]
COLUMNS = ("native", "vLLM on CPU", "vLLM on GPU", "SGLang")
MARKS = {"tested", "GPU only", "untested", "refused", ""}

NATIVE, VERBS, WEIGHTS = (f"tests/rollout/test_native{end}.py::test_" for end in ("", "_verbs", "_weights"))
SAMPLER = "tests/rollout/test_sampler.py::test_"
VLLM = "tests/rollout/vllm/test_"
TESTS: dict[str, tuple[str, ...]] = {
    "greedy tokens equal transformers'": (
        NATIVE + "greedy_equals_transformers",
        VLLM + "offline.py::test_greedy_equals_transformers",
    ),
    "a seed for each sample, whatever is beside it": (
        NATIVE + "noise_does_not_depend_on_company",
        VLLM + "server.py::test_samples_do_not_depend_on_company",
    ),
    "a length limit for each sample, stop tokens": (
        NATIVE + "stop_strings_and_limits",
        VLLM + "offline.py::test_each_sample_has_a_limit_of_its_own",
    ),
    "stop strings": (
        NATIVE + "stop_strings_and_limits",
        VLLM + "offline.py::test_a_stop_string_ends_a_response_and_is_cut_from_its_text",
    ),
    "log-probs of the policy": (
        NATIVE + "logprobs_equal_the_engines",
        VLLM + "offline.py::test_score_is_what_was_told",
    ),
    "top-p or top-k at temperature 1": (
        SAMPLER + "filters_keep_what_they_should",
        VLLM + "offline.py::test_cut_sampling_keeps_the_policys_log_probs",
    ),
    "top-p or top-k at another temperature": (
        SAMPLER + "policy_logprobs_keep_the_temperature_and_lose_the_cuts",
    ),
    "top-k and top-p together": (
        SAMPLER + "frequencies_match_the_reported_probabilities",
        VLLM + "drafting.py::test_drafts_leave_the_distribution_as_it_is",
    ),
    "min-p at temperature 1": (
        SAMPLER + "frequencies_match_the_reported_probabilities",
        VLLM + "offline.py::test_cut_sampling_keeps_the_policys_log_probs",
    ),
    "scoring given sequences": (
        VERBS + "scores_are_transformers_log_probs",
        VLLM + "offline.py::test_score_is_what_was_told",
    ),
    "prefix cache, counted": ("", VLLM + "offline.py::test_the_prefix_cache_is_used_and_counted"),
    "tensor parallel": (
        NATIVE + "greedy_equals_transformers",
        VLLM + "parallel.py::test_greedy_equals_transformers",
    ),
    "pipeline parallel": (NATIVE + "greedy_equals_transformers",),
    "server mode (`rollout.mode=server`)": ("", VLLM + "server.py::test_pause_holds_and_resume_goes_on"),
    "sleep and wake": (WEIGHTS + "sleep_and_wake", VLLM + "parallel.py::test_sleeps_and_wakes"),
    "pause, resume and abort": (
        VERBS + "pause_holds_another_thread_and_abort_ends_it",
        VLLM + "server.py::test_abort_ends_what_is_under_way",
    ),
    "new weights in place": (
        WEIGHTS + "brought_weights_generate_and_are_proved",
        VLLM + "update.py::test_new_weights_are_what_generates",
    ),
    "fingerprints of the live weights": (
        WEIGHTS + "the_proof_names_what_is_wrong",
        VLLM + "weights.py::test_what_changes_after_loading_is_named",
    ),
    "a process that dies is named": (
        "tests/controller/test_replicas.py::test_without_restart_the_run_ends_and_names_the_process",
        VLLM + "parallel.py::test_a_worker_that_dies_is_named",
    ),
    "routes of experts (`rollout.return_routes`)": (
        VERBS + "routes_are_transformers_choices",
        VLLM + "routes.py::test_routes_are_those_of_transformers",
    ),
    "speculative decoding, counted": ("", VLLM + "families.py::test_drafts_are_counted_and_change_nothing"),
    "gpt-oss": (NATIVE + "every_family_generates", VLLM + "gpt_oss.py::test_new_weights"),
}
"""What tests each feature natively, and of vLLM on CPU."""

REFUSED = {
    "top-p or top-k at another temperature": {"top_p": 0.9, "temperature": 0.7},
    "top-k and top-p together": {"top_k": 5, "top_p": 0.9},
    "min-p at temperature 1": {"min_p": 0.1},
    "pipeline parallel": {"layout": {"pp": 2}},
    "expert parallel": {"layout": {"tp": 2, "ep": 2}},
    "server mode (`rollout.mode=server`)": {"mode": "server"},
    "weights in 8 bits (`rollout.quantization=fp8`)": {"quantization": "fp8"},
    "routes and speculative decoding": {
        "return_routes": True,
        "vllm": {"speculative_config": {"method": "ngram"}},
        "sglang": {"speculative_algorithm": "NGRAM"},
    },
}
"""What a recipe asks for that is refused."""

PAGE = (ROOT / "docs" / "rollout.md").read_text(encoding="utf-8")


def table() -> dict[str, list[str]]:
    _, _, section = PAGE.partition("## What is supported")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]
    assert tuple(cells[0][1:]) == COLUMNS
    return {row[0]: row[1:] for row in cells[2:]}


TABLE = table()


@pytest.mark.parametrize("feature", TABLE)
def test_what_is_called_tested_has_a_test(feature):
    cells = TABLE[feature]
    assert set(cells) <= MARKS
    assert "tested" not in cells[2:], "tests run on CPUs, and without SGLang"
    tests = TESTS.get(feature, ())
    for number, mark in enumerate(cells[:2]):
        one = tests[number] if number < len(tests) else ""
        assert bool(one) == (mark == "tested"), (COLUMNS[number], mark)
        if one:
            file, _, name = one.partition("::")
            assert re.search(rf"^def {name}", (ROOT / file).read_text(), re.MULTILINE), one


@pytest.mark.parametrize("feature", TABLE)
def test_what_is_called_refused_is(feature):
    native, on_cpu, on_gpu, sglang = (mark == "refused" for mark in TABLE[feature])
    if not (native or on_cpu or on_gpu or sglang):
        assert feature not in REFUSED
        return
    asked = REFUSED[feature]

    def recipe(backend: str) -> Recipe:
        return Recipe.model_validate({"rollout": {"backend": backend, **asked}})

    assert bool(list(sglang_refusals(recipe("sglang").rollout))) == sglang
    assert bool(list(vllm_refusals(recipe("vllm").rollout))) == on_gpu
    if native:
        from quintet.recipe.rules.facts import RULES

        assert "keys_are_read" in {rule.__name__ for rule in RULES}
        one = recipe("native")
        unavailable = [missing for missing, _ in NOT_AVAILABLE if missing.is_on(one, None)]
        assert unavailable or {"mode", "quantization"} & asked.keys()


def test_what_is_on_record_is_not_called_untested():
    """Of 8 bits, whose step beside bf16 vLLM has run in on GPUs."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "step.json").read_text(encoding="utf-8"))
    assert any(row["case"].endswith("/blockwise") for row in rows)
    assert TABLE["weights in 8 bits (`rollout.quantization=fp8`)"][COLUMNS.index("vLLM on GPU")] == "GPU only"
