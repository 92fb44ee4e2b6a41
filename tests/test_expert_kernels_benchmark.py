"""The benchmark of kernels for experts, as far as a CPU runs it: what its sides are, what it concludes, and its plumbing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import expert_kernels
from benchmarks.engine_work import MODELS, setup_of
from benchmarks.pairs import Taken
from benchmarks.room import needed
from quintet.plan.kernels import experts_of, read_kernels
from quintet.recipe.megatron import FUSED_EXPERTS, TORCH_EXPERTS
from quintet.recipe.schema import Layout, Recipe
from tests.benchmark_runs import benchmark
from tests.test_fp8_benchmark import H100_BYTES, H200_BYTES


@pytest.mark.parametrize("kernel", FUSED_EXPERTS)
def test_the_sides_differ_by_the_kernel_and_fit_a_gpu(kernel: str) -> None:
    (name, fused), (_, plain) = expert_kernels.setups(expert_kernels.arguments([]), kernel)
    assert name == kernel
    assert fused.engine_recipe.megatron == {kernel: True}
    assert plain.engine_recipe.megatron == {kernel: False}
    assert fused.rows(0) == plain.rows(0)
    assert needed([fused, plain]) < 0.95 * H200_BYTES


def test_the_experts_of_one_of_several_ranks() -> None:
    (_, ours), (_, theirs) = expert_kernels.setups(expert_kernels.arguments(["--ep", "4"]), TORCH_EXPERTS)
    assert (ours.engine_recipe.experts, theirs.engine_recipe.experts) == ("torch", "transformer_engine")
    assert experts_of(ours.shape) == experts_of(MODELS["qwen3-30b-a3b"].shape, Recipe(layout=Layout(ep=4)))
    with pytest.raises(SystemExit, match="--ep 3 does not divide the 128 experts of qwen3-30b-a3b"):
        expert_kernels.setups(expert_kernels.arguments(["--ep", "3"]), TORCH_EXPERTS)


def test_a_smaller_card_has_fewer_layers() -> None:
    kernel = FUSED_EXPERTS[0]
    for words, layers in (([], 2), (["--tokens", "32768"], 1), (["--sequential"], 4)):
        sides = expert_kernels.setups(expert_kernels.arguments(words), kernel, H100_BYTES)
        assert [one.layers for _, one in sides] == [layers] * 2
    with pytest.raises(
        SystemExit, match=r"4 layers take 1\d\d GiB of a card of 79, .*: --layers 2 fits, --sequential"
    ):
        expert_kernels.setups(expert_kernels.arguments(["--layers", "4"]), kernel, H100_BYTES)


def taken(*turns: list[float], loss: float = 2.0) -> Taken:
    made = Taken()
    for seconds in turns:
        made.add([{"seconds": seconds, "losses": [loss] * len(seconds), "peak_gib": 1.0}])
    return made


def test_a_turn_counts_by_its_median_step_and_a_step_by_its_slowest_rank() -> None:
    ours = taken([1.0, 1.0, 9.0], [2.0, 2.0, 2.0])
    theirs = Taken()
    theirs.add([{"seconds": [1.1, 1.1, 1.1], "losses": [1.0] * 3, "peak_gib": 1.0}] * 2)
    theirs.add([{"seconds": [one, 1.0, one], "losses": [1.0] * 3, "peak_gib": 1.0} for one in (1.0, 1.8)])
    setup = setup_of("tiny-moe", backend="portable")
    rates = expert_kernels.rates_of(setup, ours, theirs)
    tokens = setup.tokens_per_step
    assert rates == [pytest.approx((tokens, tokens / 1.1)), pytest.approx((tokens / 2, tokens / 1.8))]
    assert theirs.losses[0] == 2.0


def measured(monkeypatch: pytest.MonkeyPatch, directory: Path, *sides: Taken) -> list[str]:
    """Run the benchmark as if a GPU had taken these turns; its arguments."""
    monkeypatch.setattr(expert_kernels, "in_turns", lambda pair, args: list(sides))
    monkeypatch.setattr(expert_kernels, "device_name", lambda: "NVIDIA H200")
    (directory / "table.json").write_text("[]")
    monkeypatch.setattr("sys.argv", ["benchmarks/expert_kernels.py", "--write"])
    where = ["--out", str(directory / "out.json"), "--table", str(directory / "table.json")]
    return ["--kernel", "moe_permute_fusion", *where]


def test_what_was_measured_is_written_where_runs_choose_by_it(tmp_path, monkeypatch, capsys) -> None:
    words = measured(monkeypatch, tmp_path, taken([1.0], [1.0], [1.0]), taken([1.1], [1.06], [1.08]))
    assert expert_kernels.main(words) == 0
    assert read_kernels(tmp_path / "table.json") == []
    assert expert_kernels.main([*words, "--write"]) == 0
    (row,) = read_kernels(tmp_path / "table.json")
    assert (row.device, row.kernel, row.speedup, row.least) == (
        "NVIDIA H200",
        "moe_permute_fusion",
        1.08,
        1.06,
    )
    assert row.experts == {"hidden_size": 2048, "experts": 128, "top_k": 8, "ffn_hidden_size": 768}
    assert row.command == "python -m benchmarks.expert_kernels --write"
    assert row.taken
    (record,) = json.loads((tmp_path / "out.json").read_text())
    tokens = setup_of("qwen3-30b-a3b", backend="transformer_engine").tokens_per_step
    assert record["case"] == "qwen3-30b-a3b/te/layers4/moe_permute_fusion"
    assert (record["value"], record["baseline"]) == pytest.approx((tokens, tokens / 1.08))
    assert "1.080 times as fast, in the worst turn 1.060: taken" in capsys.readouterr().out


@pytest.mark.parametrize(("turns", "ratio"), [(2, 0.95), (3, 1.05)])
def test_the_record_says_what_the_row_says(tmp_path, monkeypatch, turns: int, ratio: float) -> None:
    """A host that became slower after the first turn: by the medians of all steps the kernel would be the slower in both."""
    ours = taken(*[[1.0, 1.0, 1.0], [3.0, 2.0, 2.0], [2.0, 2.0, 2.0]][:turns])
    theirs = taken(*[[0.95, 0.95, 0.95], [1.9, 2.32, 2.32], [1.0, 2.1, 2.1]][:turns])
    assert theirs.seconds / ours.seconds == pytest.approx(0.95)
    words = measured(monkeypatch, tmp_path, ours, theirs)
    assert expert_kernels.main([*words, "--write"]) == 0
    (row,) = read_kernels(tmp_path / "table.json")
    (record,) = json.loads((tmp_path / "out.json").read_text())
    assert (row.speedup, row.least) == (ratio, 0.95)
    assert record["value"] / record["baseline"] == pytest.approx(ratio)


def test_sides_that_compute_something_else_are_not_compared(tmp_path, monkeypatch) -> None:
    words = measured(monkeypatch, tmp_path, taken([1.0]), taken([1.1], loss=2.01))
    with pytest.raises(SystemExit, match=r"the first losses are 0.50% apart"):
        expert_kernels.main([*words, "--write"])
    assert read_kernels(tmp_path / "table.json") == []
    assert not (tmp_path / "out.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert expert_kernels.main([]) == 1
    assert "no GPU was found; --shape tiny-moe" in capsys.readouterr().err


@pytest.mark.nightly
def test_it_runs_dry() -> None:
    words = (
        "--shape",
        "tiny-moe",
        "--kernel",
        "moe_permute_fusion",
        "--rounds",
        "1",
        "--steps-per-turn",
        "1",
    )
    printed = benchmark("expert_kernels", *words)
    assert "tiny-moe/portable/moe_permute_fusion: " in printed
    assert "nothing is recorded" in printed
