"""The benchmark of products in 8 bits, as far as a CPU runs it: what it asks for, what its cases are called, and its plumbing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import experts, fp8, fp8_proof, step
from quintet.plan.memory import rank_memory
from quintet.plan.setup import Place, Setup
from quintet.recipe import schema
from quintet.recipe.fp8 import MULTIPLE, matrices
from quintet.recipe.schema import Layout
from tests.benchmark_runs import benchmark

H200_BYTES = 139.8 * 2**30
"""As torch tells it."""


@pytest.mark.parametrize(
    ("words", "cases"),
    [
        ([], ["8b/gpus1/layers8of36/blockwise", "8b/gpus1/layers8of36/tensorwise"]),
        (
            ["--gpus", "4", "--recompute", "full", "--sequential", "--fp8", "blockwise"],
            ["8b/gpus4/recompute-full/blockwise"],
        ),
        (
            ["--shape", "30b-a3b", "--gpus", "4", "--fp8", "blockwise"],
            ["30b-a3b/gpus4-ep4/layers12of48/blockwise"],
        ),
        (
            ["--gpus", "4", "--layout", "tp=2,sp=true", "--layers", "8", "--fp8", "tensorwise"],
            ["8b/gpus4-tp2-sp/layers8of36/tensorwise"],
        ),
        (["--shape", "tiny"], ["tiny/gpus1/bf16"]),
    ],
)
def test_cases_say_what_was_cut(words: list[str], cases: list[str]) -> None:
    args = fp8.arguments(words)
    pairs = fp8.setups(args)
    assert [fp8.case(args.shape, ours) for ours, _ in pairs] == cases
    for ours, theirs in pairs:
        assert not theirs.engine
        assert ours.rows(0) == theirs.rows(0)
        if ours.engine:  # rows and matrices are whole multiples: nothing falls back to bf16
            assert ours.tokens // (ours.size("tp") if ours.layout.get("sp") else 1) % 128 == 0
            multiple = MULTIPLE[ours.engine["fp8"]]
            layout = Layout(**ours.layout)
            assert all(m.outputs % multiple == m.inputs % multiple == 0 for m in matrices(ours.shape, layout))


@pytest.mark.parametrize(("shape", "gpus"), fp8.FITTING)
def test_both_sides_fit_the_gpus(shape: str, gpus: int) -> None:
    words = ["--shape", shape, "--gpus", str(gpus), "--fp8", "blockwise"]
    ((ours, theirs),) = fp8.setups(fp8.arguments(words))
    peaks, rests = [], []
    for one in (ours, theirs):
        plan = Setup(
            one.shape, Layout(**one.layout), gpus, engine=one.engine_recipe, backend="transformer_engine"
        )
        memory = rank_memory(plan, Place())
        peaks.append(memory.peak)
        rests.append(memory.parameters + memory.gradients + memory.optimizer)
    assert max(peaks[0] + rests[1], peaks[1] + rests[0]) < 0.95 * H200_BYTES


@pytest.mark.parametrize(
    "words", [["--layers", "37"], ["--layers", "0"], ["--shape", "tiny", "--fp8", "blockwise"]]
)
def test_what_cannot_be_measured_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        fp8.arguments(words)


@pytest.mark.parametrize("eight", [True, False])
def test_a_whole_step_has_both_sides_in_8_bits(
    eight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = step.arguments(["--gpus", "8", "--shape", "qwen3-8b", *(["--fp8"] if eight else [])])
    assert step.sides_of(args) == ("quintet", "bf16" if eight else "trl")
    made: list[schema.Recipe] = []
    monkeypatch.setattr("benchmarks.laptop_quintet.run_steps", lambda recipe, work: made.append(recipe))
    step.quintet(args, tmp_path, {"lengths": [[1] * 8], "longest": 5, "prompt_tokens": 5})
    told = made[0].engine.fp8, made[0].rollout.quantization, made[0].rollout.backend
    assert told == (("blockwise", "fp8", "vllm") if eight else (None, None, "vllm"))
    for other in (["--tiny"], ["--only", "trl"]):
        with pytest.raises(SystemExit):
            step.arguments(["--fp8", *other])


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8.main([]) == 1
    assert fp8_proof.main([]) == 1
    assert experts.main([]) == 1
    assert capsys.readouterr().err.count("no GPU was found; ") == 3


def test_experts_agree_grouped_and_one_by_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert experts.main(["--tiny"]) == 0
    assert "8x16-hidden32-tokens64-top2/portable: " in capsys.readouterr().out
    monkeypatch.setattr(experts, "AGREE", -1.0)
    with pytest.raises(SystemExit, match="the two ways differ by"):
        experts.main(["--tiny"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "tiny", "--rounds", "1", "--steps-per-turn", "1"], "nothing is recorded"),
        (
            ["--shape", "tiny", "--rounds", "2", "--steps-per-turn", "1", "--sequential"],
            "nothing is recorded",
        ),
        (["--shape", "tiny", "--prove"], "holds  tiny bf16, log-probs of an update: 0 of "),
        (["--shape", "tiny", "--prove"], "holds  tiny-moe bf16, with routes that are told: 0 of "),
    ],
)
def test_it_runs_dry(words: list[str], said: str) -> None:
    printed = benchmark("fp8", *words)
    assert said in printed
    assert "FAILED" not in printed
