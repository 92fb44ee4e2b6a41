"""The benchmark of products in 8 bits, as far as a CPU runs it: what it asks for, what its cases are called, and its plumbing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import experts, fp8, fp8_proof, step
from benchmarks.room import needed
from quintet.engine import fp8 as fp8_engine
from quintet.recipe import schema
from quintet.recipe.fp8 import MULTIPLE, matrices
from quintet.recipe.schema import Layout
from tests.benchmark_runs import benchmark

H200_BYTES = int(139.8 * 2**30)
H100_BYTES = int(79.2 * 2**30)
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
        (
            ["--layers", "4", "8", "--fp8", "blockwise"],
            ["8b/gpus1/layers4of36/blockwise", "8b/gpus1/layers8of36/blockwise"],
        ),
        (["--shape", "tiny"], ["tiny/gpus1/bf16"]),
    ],
)
def test_cases_say_what_was_cut(words: list[str], cases: list[str]) -> None:
    args = fp8.arguments(words)
    pairs = [pair for depths in fp8.setups(args) for pair in depths]
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
    (((ours, theirs),),) = fp8.setups(fp8.arguments(words), H200_BYTES)
    assert ours.layers == theirs.layers == fp8.FITTING[shape, gpus]
    assert needed([ours, theirs]) < 0.95 * H200_BYTES


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ([], 2),
        (["--sequential"], 8),
        (["--tokens", "8192"], 3),
        (["--shape", "30b-a3b"], 1),
        (["--shape", "30b-a3b", "--sequential"], 4),
        (["--sequential", "--recompute", "full", "--layers", "8"], 8),
    ],
)
def test_a_smaller_card_has_fewer_layers(words: list[str], layers: int) -> None:
    args = fp8.arguments([*words, "--fp8", "blockwise"])
    (((ours, theirs),),) = fp8.setups(args, H100_BYTES)
    assert ours.layers == theirs.layers == layers
    assert needed([ours, theirs], args.sequential) <= 0.93 * H100_BYTES


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--layers", "8"],
            "8 layers take 119 GiB of a card of 79, of which 93% count: --layers 2 fits, --seq",
        ),
        (
            ["--layers", "2", "4"],
            "4 layers take 84 GiB .*: --layers 2 fits, --sequential has one side at a time",
        ),
        (["--layers", "9", "--sequential"], "9 layers .*: --layers 8 fits; --tokens makes rows smaller"),
        (["--shape", "30b-a3b", "--tokens", "262144"], "1 layers .*: no depth fits, --sequential"),
    ],
)
def test_what_does_not_fit_the_card_is_said_before_it_is_started(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        fp8.setups(fp8.arguments([*words, "--fp8", "blockwise"]), H100_BYTES)


def test_all_layers_are_where_a_line_through_fewer_comes_to() -> None:
    ((four, eight),) = fp8.setups(fp8.arguments(["--layers", "4", "8", "--fp8", "blockwise"]))
    found = [
        fp8.Found(pair, (0.3 + 0.1 * layers, 0.3 + 0.2 * layers), (1.0, 1.0))
        for pair, layers in ((four, 4), (eight, 8))
    ]
    case, setup, seconds = fp8.fitted("8b", found)
    assert case == "8b/gpus1/by-layers4-8of36/blockwise"
    assert setup.shape.layers == 36
    assert seconds == pytest.approx((0.3 + 3.6, 0.3 + 7.2))


def test_an_aim_is_held_against_all_layers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    (((cut, _),),) = fp8.setups(fp8.arguments(["--fp8", "blockwise"]))
    fp8.tell("cut", "8b", cut, (1.0, 1.5))
    assert "1.500x of bf16's" in (line := capsys.readouterr().out)
    assert line.endswith("(aim: 1.42 of all layers)\n")
    for seconds, said in ((1.5, "reached"), (1.4, "missed")):
        fp8.tell("all", "8b", replace(cut, layers=None), (1.0, seconds))
        assert capsys.readouterr().out.endswith(f"(aim: 1.42 of all layers, {said})\n")


@pytest.mark.parametrize(
    "words",
    [
        ["--layers", "37"],
        ["--layers", "0"],
        ["--layers", "4", "4"],
        ["--shape", "tiny", "--fp8", "blockwise"],
        ["--shape", "tiny", "--fp8", "blockwise", "--prove"],
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        fp8.arguments(words)


def test_the_proof_takes_no_options_of_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8.arguments(["--prove", "--shape", "8b", "--fp8", "blockwise"]).prove
    with pytest.raises(SystemExit):
        fp8.arguments(["--prove", "--gpus", "4", "--steps-per-turn", "1"])
    assert "leave --gpus, --steps-per-turn out" in capsys.readouterr().err


def test_more_gpus_than_there_are_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fp8, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(fp8, "gpus_here", lambda: 1)
    assert fp8.main(["--gpus", "4"]) == 1
    assert capsys.readouterr().err == "--gpus 4: this machine has 1\n"


def proof_claims() -> fp8_proof.Claims:
    claims = fp8_proof.Claims()
    claims.name, claims.case = "8b blockwise", "8b/gpus1/layers2/words4096/blockwise/proof"
    return claims


@pytest.mark.parametrize(
    ("ours", "theirs", "held", "said"),
    [
        ([9.0, *[4.04] * 10], [9.0, *[4.0] * 10], True, "+1.00% beside bf16's 4.000; the text has 1.9"),
        ([9.0, *[4.16] * 10], [9.0, *[4.0] * 10], False, "+4.00% beside bf16's 4.000"),
        (
            [9.0, *[8.9] * 10],
            [9.0, *[8.9] * 10],
            False,
            "bf16 learnt too little to tell: 99% of its first loss",
        ),
        ([math.nan, *[4.0] * 10], [9.0, *[4.0] * 10], False, "a loss or gradient norm is not finite"),
    ],
)
def test_the_proof_compares_losses_of_models_that_learn(
    ours: list[float], theirs: list[float], held: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    claims, case = proof_claims(), fp8_proof.Case("8b", tiny=False)
    pairs = [[(loss, 1.0) for loss in one] for one in (ours, theirs)]
    fp8_proof.same_loss(case, *pairs, claims)
    assert claims.held is held
    line = capsys.readouterr().out
    assert said in line
    assert line.startswith("holds  8b blockwise, 50 steps: " if held else "FAILED 8b blockwise, 50 steps: ")
    (made,) = claims.records
    assert (made["bench"], made["case"], made["metric"]) == ("fp8", claims.case, "sft_loss")
    assert (made["value"], made["baseline"]) == pytest.approx((ours[-1], theirs[-1]))


def test_the_proof_has_fresh_text_at_each_step() -> None:
    case = fp8_proof.Case("30b-a3b", tiny=False)
    assert len(case.texts) == 50
    assert case.plain.shape.vocab_size == 4096
    starts = [tuple(rows[0][0][:32].tolist()) for rows in case.texts]
    assert len(set(starts)) == 50
    again = fp8_proof.texts(case.plain, 7)
    assert [[one.tolist() for one in row] for row in again] == [
        [one.tolist() for one in row] for row in case.texts[7]
    ]


def test_figures_that_are_none_are_told_and_not_kept() -> None:
    claims = proof_claims()
    claims.tell("recompute", "nan apart", False, ("recompute_apart", math.nan, "fraction"))
    claims.tell("blocks", "other than sent: none", True, ("other_blocks", 0, "weights"))
    assert [one["metric"] for one in claims.records] == ["other_blocks"]
    assert not claims.held


class Whole:
    """A quantiser as far as the proof asks one: to whole numbers."""

    rowwise = False

    def copy(self) -> Whole:
        return Whole()

    def set_usage(self, rowwise: bool, columnwise: bool) -> None:
        self.rowwise = rowwise and not columnwise

    def quantize(self, weight: torch.Tensor) -> SimpleNamespace:
        assert self.rowwise
        rounded = weight.round()
        return SimpleNamespace(_quantizer=Whole(), dequantize=lambda: rounded)


@pytest.mark.parametrize("stale", [False, True])
def test_an_old_copy_of_a_weight_is_told(stale: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two layers, of which one's weight is another since its copy was made."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    kept, made = fp8_engine.drop_copies, Whole()
    made.set_usage(rowwise=True, columnwise=False)

    def forward() -> None:
        for layer in layers:
            layer._fp8_workspaces = {"weight": made.quantize(layer.weight.detach())}
        if stale:
            with torch.no_grad():
                layers[1].weight[3, 3] += 2
        fp8_engine.drop_copies([layers])

    claims = proof_claims()
    loop = SimpleNamespace(engine=SimpleNamespace(forward=forward, chunks=[layers]), steps=[()])
    fp8_proof.tell_copies(loop, "resume", "blockwise", claims)
    assert claims.held is not stale
    old = "1 old ['1.weight']" if stale else "0 old []"
    said = f"8b blockwise, copies after resume: 2 copies, {old}, 0 left\n"
    assert capsys.readouterr().out == ("FAILED " if stale else "holds  ") + said
    (one,) = claims.records
    assert (one["metric"], one["value"]) == ("old_copies_after_resume", int(stale))
    assert fp8_engine.drop_copies is kept


@pytest.mark.parametrize("eight", [True, False])
def test_a_whole_step_has_both_sides_in_8_bits(
    eight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = step.arguments(["--gpus", "8", "--shape", "qwen3-8b", *(["--fp8"] if eight else [])])
    assert step.sides_of(args) == ("quintet", "bf16" if eight else "trl")
    made: list[schema.Recipe] = []
    monkeypatch.setattr("benchmarks.laptop_quintet.run_steps", lambda recipe, *_: made.append(recipe))
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "tiny", "--rounds", "1", "--steps-per-turn", "1"], ["nothing is recorded"]),
        (
            ["--shape", "tiny", "--rounds", "2", "--steps-per-turn", "1", "--sequential"],
            ["nothing is recorded"],
        ),
        (
            ["--shape", "tiny", "--prove"],
            [
                "holds  tiny bf16, log-probs of an update: 0 of ",
                "holds  tiny-moe bf16, with routes that are told: 0 of ",
                "holds  tiny-moe bf16, copies after resume: 0 copies, 0 old [], 0 left",
            ],
        ),
    ],
)
def test_it_runs_dry(words: list[str], said: list[str]) -> None:
    printed = benchmark("fp8", *words)
    assert all(line in printed for line in said)
    assert "FAILED" not in printed
