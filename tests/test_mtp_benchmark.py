"""The benchmark of drafts: its model is what it says, and what it tells of what was measured."""

from __future__ import annotations

import json
from itertools import pairwise
from math import log
from pathlib import Path

import pytest

from benchmarks.mtp import arguments, cases, measured
from benchmarks.mtp_work import LIKELY, SHAPES
from benchmarks.records import check
from quintet.models import check_weights, read_shape
from tests.benchmark_runs import benchmark

TINY = SHAPES["tiny"]


def test_the_language_has_the_entropy_that_is_said() -> None:
    language = TINY.language
    text, follows = language.text(20_000, seed=1), language.followers
    assert sorted(follows) == list(range(language.words))
    right = sum(follows[a] == b for a, b in pairwise(text)) / (len(text) - 1)
    p = LIKELY + (1 - LIKELY) / language.words
    assert right == pytest.approx(p, abs=0.02)
    rest = (1 - p) / (language.words - 1)
    assert language.entropy == pytest.approx(-p * log(p) - (1 - p) * log(rest))


@pytest.mark.slow
def test_the_model_learns_it_and_its_layer_too(tmp_path: Path) -> None:
    told = json.loads(benchmark("mtp_train", "--shape", "tiny", "--model", str(tmp_path / "model")))
    assert told["loss"] == told["loss_without"]  # the layer takes nothing from the model
    assert told["loss"] < told["entropy"] + 0.2
    assert told["accuracy_ahead"] == pytest.approx(LIKELY, abs=0.1)
    shape = read_shape(tmp_path / "model")
    assert (shape.family, shape.layers, shape.mtp_layers) == ("mimo", TINY.layers, 1)
    check_weights(tmp_path / "model", shape)


@pytest.mark.parametrize(
    "options", [["--lengths", "1", "2"], ["--lengths", "0", "1", "1"], ["--rounds", "0"], ["--shape", "7b"]]
)
def test_what_cannot_be_measured_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(options)


def test_records_and_rows_follow_from_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(["--shape", "tiny", "--lengths", "0", "1"])
    assert cases(TINY) == [(1, 32), (4, 32)]
    told = {
        0: {"device": "NVIDIA H200", "rounds": [[(2.0, 0.0, 0.0)], [(1.0, 0.0, 0.0)]]},
        1: {
            "device": "NVIDIA H200",
            "rounds": [[(1.0, 0.7, 0.7), (1.0, 0.8, 0.8), (9.0, 0.75, 0.75)], [(2.0, 0.75, 0.7)]],
        },
    }
    records, rows = measured(args, told)
    for one in records:
        check(one)
    by_case = {(one["case"], one["metric"]): (one["value"], one["baseline"]) for one in records}
    assert by_case["tiny/vllm/seqs1/context32/k1", "rollout_tokens_per_s"] == (16.0, 8.0)
    assert by_case["tiny/vllm/seqs4/context32/k1", "rollout_tokens_per_s"] == (32.0, 64.0)
    assert by_case["tiny/vllm/seqs1/context32/k1", "accepted_length"] == (1.75, None)
    assert by_case["tiny/vllm/seqs4/context32/k1", "acceptance"] == (0.7, None)
    assert by_case["tiny/vllm/seqs1/context32/auto", "rollout_tokens_per_s"] == (16.0, 8.0)
    assert by_case["tiny/vllm/seqs4/context32/auto", "rollout_tokens_per_s"] == (64.0, 64.0)
    assert [(row["sequences"], row["accepted"], row["speedup"]) for row in rows] == [
        (1, 0.75, 2.0),
        (4, 0.75, 0.5),
    ]
    assert "none was measured faster" in capsys.readouterr().out


@pytest.mark.vllm
@pytest.mark.nightly
def test_it_measures(tmp_path: Path) -> None:
    """A dry run."""
    written = ("--out", str(tmp_path / "records.json"), "--table", str(tmp_path / "table.json"))
    benchmark("mtp", "--shape", "tiny", "--rounds", "1", "--lengths", "0", "1", *written)
    rows = json.loads((tmp_path / "table.json").read_text())
    assert all(
        0.5 < row["accepted"] <= 1 for row in rows
    )  # of one sequence 16 drafts, which may all be accepted
    assert len(json.loads((tmp_path / "records.json").read_text())) == 13
