"""The benchmark of drafts: its model is what it says, and what it tells of what was measured."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mtp import METRIC, arguments, cases, measured, refuse_short, shape_of, with_rows
from benchmarks.mtp_work import LIKELY, SHAPES
from benchmarks.records import RESULTS, check
from quintet.models import check_weights, read_shape
from quintet.rollout.draft_length import Measured, choose, read_table
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


@pytest.mark.nightly
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


RECORDS = {(one["case"], one["metric"]): one for one in json.loads((RESULTS / "mtp.json").read_text())}


def recorded(row: Measured, what: str = METRIC) -> dict[str, Any]:
    """The record of a draft length at a place of the table."""
    name = f"400m/vllm/seqs{row.sequences}/context{row.context_tokens}"
    return RECORDS[f"{name}/k{row.draft_tokens}", what]


def test_the_table_that_auto_reads_is_what_the_records_say() -> None:
    table = read_table()
    drafted = [one for (case, what), one in RECORDS.items() if what == METRIC and re.search("/k[1-9]$", case)]
    assert len(table) == len(drafted) > 0
    for row in table:
        one = recorded(row)
        assert one["hardware"] == f"1 x {row.device}"
        assert row.speedup == pytest.approx(one["value"] / one["baseline"], abs=6e-4)
        assert 1 + row.accepted == pytest.approx(recorded(row, "accepted_length")["value"], abs=6e-4)


def test_auto_is_nowhere_slower_than_no_drafts() -> None:
    """At each place that was measured: what it takes is recorded, at 0.97 of the speed without drafts or more."""
    table = read_table()
    places = {(row.device, row.sequences, row.context_tokens) for row in table}
    for device, sequences, context in places:
        chosen = choose(table, device, sequences, context, (1, 2, 3)).draft_tokens
        auto = RECORDS[f"400m/vllm/seqs{sequences}/context{context}/auto", METRIC]
        assert auto["value"] == recorded(Measured(device, sequences, context, chosen, 0, 0))["value"]
        assert auto["value"] >= 0.97 * auto["baseline"]


def test_other_places_can_be_measured() -> None:
    args = arguments(["--sequences", "16", "128", "--contexts", "12288"])
    shape = shape_of(args)
    assert cases(shape) == [(16, 12288), (128, 12288)]
    assert shape.build()["max_position_embeddings"] >= 12288 + shape.response
    assert shape_of(arguments([])) == SHAPES["400m"]


def test_a_kept_model_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    shape = SHAPES["400m"]
    (tmp_path / "config.json").write_text(json.dumps(shape.build()))
    refuse_short(tmp_path, shape)
    with pytest.raises(SystemExit, match="has 4608 positions, and these contexts need 16896"):
        refuse_short(tmp_path, shape.at(None, [16384]))


def test_new_rows_of_a_table_take_the_place_of_the_same_ones() -> None:
    def row(device: str, context: int, speedup: float) -> dict[str, Any]:
        return {
            "device": device,
            "sequences": 8,
            "context_tokens": context,
            "draft_tokens": 1,
            "speedup": speedup,
        }

    before = [row("a", 512, 1.0), row("a", 4096, 1.1), row("b", 512, 1.2)]
    after = with_rows(before, [row("a", 4096, 1.3), row("a", 16384, 1.4)])
    assert [(one["device"], one["context_tokens"], one["speedup"]) for one in after] == [
        *[("a", 512, 1.0), ("b", 512, 1.2), ("a", 4096, 1.3), ("a", 16384, 1.4)]
    ]


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
