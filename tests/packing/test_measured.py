"""Measured constants of the planner's model of time: which are taken, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.engine_work import MODELS
from quintet.packing import measured
from quintet.packing.measured import MeasuredCosts, costs_of, fitting, layer_of, read_measured, write_measured
from quintet.packing.time_model import CellCosts

DENSE, MOE = MODELS["qwen3-8b"].shape, MODELS["qwen3-30b-a3b"].shape
ROW = MeasuredCosts(
    "NVIDIA H200", layer_of(DENSE), 300.0, 2e-5, (0.03, 0.05), 36, "a command", "abc", "2026-11-23"
)


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    path.write_text("[]")
    write_measured(ROW, path)
    monkeypatch.setattr(measured, "read_measured", lambda table=path: read_measured(table))
    return path


def test_a_row_counts_where_device_and_layer_fit_whatever_the_depth(table):
    costs, told = costs_of(replace(DENSE, layers=12), 1, "NVIDIA H200")
    assert costs == CellCosts(300.0, 2e-5, (0.03, 0.05))
    assert "measured on NVIDIA H200 in bf16 with all_gather (a command, 2026-11-23)" in told


@pytest.mark.parametrize(
    ("shape", "tp", "device"),
    [(DENSE, 1, "NVIDIA A100"), (DENSE, 1, "cpu"), (DENSE, 2, "NVIDIA H200"), (MOE, 1, "NVIDIA H200")],
)
def test_else_the_defaults_do_and_that_is_told(table, shape, tp, device):
    costs, told = costs_of(shape, tp, device)
    ratio = (shape.flops_per_token(1.0) / shape.flops_per_token(0.0) - 1) / 2
    assert (costs.fixed, costs.exchange) == (CellCosts().fixed, CellCosts().exchange)
    assert costs.quadratic == pytest.approx(ratio)
    assert "default constants" in told
    assert (device in told) == (tp == 1)


@pytest.mark.parametrize(
    ("name", "tp", "device", "helps"),
    [
        ("qwen3-8b", 1, "NVIDIA A100", True),
        ("qwen3-30b-a3b", 1, "a GPU", True),
        ("qwen3-8b", 1, "cpu", False),
        ("qwen3-8b", 2, "NVIDIA A100", False),  # it measures whole layers alone
        ("qwen2.5-1.5b", 1, "NVIDIA A100", False),  # it has no such shape
    ],
)
def test_the_benchmark_is_named_where_it_measures_what_is_missing(table, name, tp, device, helps):
    told = costs_of(MODELS[name].shape, tp, device)[1]
    assert told.endswith(f" (python -m benchmarks.dynamic_cp --gpus N --shape {name} --write)") == helps
    assert ("benchmarks" in told) == helps


def test_the_shapes_that_the_benchmark_offers_are_those_of_its_models():
    offered = {name: tuple(layer_of(MODELS[name].shape).values()) for name in measured.OFFERED}
    assert offered == measured.OFFERED


def test_a_row_takes_the_place_of_an_older_one_of_its_device_and_layer(table):
    write_measured(replace(ROW, fixed=200.0, layers=12), table)
    write_measured(replace(ROW, device="NVIDIA H100"), table)
    assert [(one.device, one.fixed) for one in read_measured(table)] == [
        ("NVIDIA H100", 300.0),
        ("NVIDIA H200", 200.0),
    ]


def test_one_gpu_knows_nothing_of_what_ranks_exchange(table):
    alone = replace(ROW, fixed=200.0, exchange=())
    write_measured(alone, table)
    assert read_measured(table) == [ROW]
    write_measured(replace(alone, device="NVIDIA H100"), table)
    costs, told = costs_of(DENSE, 1, "NVIDIA H100")
    assert costs == CellCosts(200.0, 2e-5)
    assert "but for what ranks exchange" in told


def test_the_committed_table_is_sound():
    rows = read_measured()
    assert len({(one.device, str(one.shape)) for one in rows}) == len(rows)
    for one in rows:
        assert set(one.shape) == set(layer_of(DENSE))
        assert one.fixed >= 0
        assert one.quadratic >= 0
        assert not one.commit.endswith("+")
        assert all(each >= 0 for each in one.exchange)
        assert one.date >= "2026-11-23"
    assert all(fitting(DENSE, 2) == [] for _ in rows)
