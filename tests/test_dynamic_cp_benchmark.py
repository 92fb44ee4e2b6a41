"""The benchmark of dynamic context parallelism: the work it declares, what it makes of times, and dry runs on a CPU."""

from __future__ import annotations

import itertools
import random
import re
import statistics
from pathlib import Path

import pytest

from benchmarks import dynamic_cp_step
from benchmarks.dynamic_cp import Ran, arguments, depth_on_one, ending_of, line_of, same
from benchmarks.dynamic_cp_work import (
    NVIDIA,
    Side,
    aligned,
    candidates,
    fit,
    layouts_of_plans,
    modelled,
    points,
    random_plan,
    work_of,
)
from quintet.packing.measured import read_measured
from quintet.packing.time_model import CellCosts
from tests.benchmark_runs import benchmark
from tests.packing.test_plan import check

WORK = work_of("qwen3-8b", 4, None, None, None)


def test_lengths_are_the_same_each_time_and_have_a_tail() -> None:
    for mix, longest in (("tail32k", 32768), ("nvidia", 8192)):
        lengths = WORK.lengths(mix)
        assert lengths == WORK.lengths(mix)
        assert max(lengths) == lengths[0] == longest
        assert statistics.median(lengths) < longest / 10
    drawn = [NVIDIA.one(generator) for generator in [random.Random(0)] for _ in range(20_000)]
    # Cutting what is longer than 8,192 takes about a tenth of the mean of 1,024.
    assert statistics.mean(drawn) == pytest.approx(920, rel=0.05)


def test_depth_is_named_where_it_is_cut() -> None:
    assert WORK.title == "qwen3-8b"
    experts = work_of("qwen3-30b-a3b", 4, None, None, None)
    assert experts.title == "qwen3-30b-a3b-12layers"
    assert (experts.layout, experts.coupled) == ({"cp": 4, "dynamic_cp": True, "ep": 4}, 4)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_static_plans_are_compared_at_every_size_and_budget_that_fits(gpus: int) -> None:
    work = work_of("qwen3-8b", gpus, None, None, 16384)
    sides = candidates(work, 32768)
    assert sides[:2] == [Side(gpus, 32768 // gpus, True), Side(gpus, 32768 // gpus)]
    assert len(sides) == len(set(sides))
    assert {side.cp for side in sides} == {cp for cp in (1, 2, 4, 8) if cp <= gpus and 32768 // cp <= 16384}
    lengths = work.lengths("tail32k")
    for side in sides:
        plan = side.plan(work, lengths, CellCosts())
        check(plan, lengths, side.budget, gpus, aligned)
        assert max(cell.cp for cell in itertools.chain(*plan.rounds)) <= side.cp


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_constants_are_those_that_times_follow(ranks: int) -> None:
    work = work_of("qwen3-8b", ranks, None, None, None)
    exchange = (0.03, 0.05)[: ranks.bit_length() - 1] or (0.0,)
    costs, found = CellCosts(300.0, 2e-5, exchange), []
    for point in points(work):
        plan, lengths = point.plan(ranks, 1)
        assert sum(len(cell.samples) for cell in plan.rounds[0]) == len(lengths)
        found.append((point, 2e-6 * modelled(plan, work, lengths, costs)))
    token, told = fit(found, ranks)
    assert token == pytest.approx(2e-6)
    assert (told.fixed, told.quadratic) == pytest.approx((300.0, 2e-5))
    assert told.exchange == pytest.approx(exchange)


def test_constants_are_never_negative() -> None:
    """A larger row that takes less time, as noise has it."""
    work = work_of("tiny", 2, None, None, None)
    rng = random.Random(0)
    for _ in range(50):
        token, costs = fit([(point, rng.uniform(0.5, 2.0)) for point in points(work)], 2)
        assert token > 0
        assert min(costs.fixed, costs.quadratic, *costs.exchange) >= 0


def test_random_plans_have_each_sample_once_and_cells_of_all_sizes() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(200):
        plan = random_plan([1] * 9, 4, 2, 3, rng)
        assert sorted(i for row in plan.rounds for cell in row for i in cell.samples) == list(range(9))
        for row in plan.rounds:
            assert [rank for cell in row for rank in cell.ranks] == list(range(8))
            seen.add(tuple(cell.cp for cell in row[: len(row) // 2]))
    assert {(4,), (2, 2), (1, 1, 2), (2, 1, 1), (1, 1, 1, 1)} <= seen
    assert (False, {"cp": 2, "pp": 2, "vpp": 2, "dynamic_cp": True}, {}) in layouts_of_plans(4)


def test_sides_that_do_other_work_are_refused() -> None:
    same([Ran(1.0, 2.0, 3.0, 0.0), Ran(9.0, 2.00001, 3.0, 0.0)], 1e-4)
    with pytest.raises(SystemExit, match="not do the same work: norm"):
        same([Ran(1.0, 2.0, 3.0, 0.0), Ran(1.0, 2.0, 3.1, 0.0)], 1e-2)
    with pytest.raises(SystemExit):
        arguments(["--gpus", "1", "--plans", "3"])


def test_steps_that_tell_other_things_are_refused() -> None:
    told = {"loss": 0.4, "grad_norm": 3.0, "entropy": 5.0}
    assert "grad_norm 3 ± 1e-05" in dynamic_cp_step.same([told, told | {"grad_norm": 3.00001}], 1e-5)
    for name, by, tolerance in (("loss", 2e-5, 1e-2), ("grad_norm", 1e-4, 1e-5), ("entropy", 0.1, 1e-2)):
        with pytest.raises(SystemExit, match=f"differ in {name}"):
            dynamic_cp_step.same([told, told | {name: told[name] + by}], tolerance)


def test_one_gpu_is_told_what_it_cannot_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert arguments(["--gpus", "1", "--write"]).write
    for options, why in (
        (["--gpus", "4", "--step"], "this machine has 1. One GPU alone"),
        (["--gpus", "1", "--step"], "--step needs ranks that share rows"),
    ):
        with pytest.raises(SystemExit):
            arguments(options)
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "gib", "layers"),
    [
        (["--gpus", "1"], 139.8, 25),
        (["--gpus", "1"], 79.2, 11),
        (["--gpus", "1", "--shape", "qwen3-30b-a3b"], 139.8, 9),
        (["--gpus", "1", "--layers", "6"], 79.2, 6),
        (["--gpus", "1"], None, None),
        (["--gpus", "1", "--shape", "tiny"], 79.2, None),
        (["--gpus", "4"], 79.2, None),
    ],
)
def test_one_gpu_has_the_layers_that_it_holds(
    options: list[str], gib: float | None, layers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert depth_on_one(arguments(options), gib and int(gib * 2**30)) == layers


def test_more_layers_than_one_gpu_holds_are_refused() -> None:
    for options, said in (
        (["--layers", "36"], r"36 layers of qwen3-8b take 1\d\d GiB of a card of 79: --layers 11 fits"),
        (["--most-tokens", "524288"], r"36 layers .*: --most-tokens makes rows smaller"),
    ):
        with pytest.raises(SystemExit, match=said):
            depth_on_one(arguments(["--gpus", "1", *options]), int(79.2 * 2**30))


@pytest.mark.parametrize(
    ("case", "metric", "value", "baseline", "said"),
    [
        ("a/longest", "share_of_ceiling", 0.91, None, "(aim: 0.9 or more, reached)"),
        ("a/longest", "seconds_as_modelled", 1.2, 1.0, "1.200× (aim: 0.85 to 1.15, missed)"),
        ("a/step", "tokens_per_s", 120.0, 100.0, "1.200× (aim: 1.15 or more, reached)"),
        ("a/step-old-logprobs", "tokens_per_s", 120.0, 100.0, "1.200×"),
    ],
)
def test_aims_are_told_beside_what_they_are_of(
    case: str, metric: str, value: float, baseline: float | None, said: str
) -> None:
    one = {"case": case, "metric": metric, "value": value, "unit": "x", "baseline": baseline}
    assert line_of(one).endswith(said)


def test_cases_say_what_is_not_usual() -> None:
    assert not ending_of(arguments([]))
    assert ending_of(arguments(["--slow-links"])) == "-slow-links"
    assert ending_of(arguments(["--slow-links", "--old-logprobs"])) == "-old-logprobs-slow-links"


def dry_run(*options: str, gpus: int = 2) -> str:
    return benchmark("dynamic_cp", "--shape", "tiny", "--gpus", str(gpus), *options)


@pytest.mark.nightly
def test_dynamic_cp_is_measured_on_a_cpu() -> None:
    told = dry_run("--turns", "1", "--calibration-turns", "1")
    for case in ("ceiling", "longest", "best_static"):
        assert re.search(
            rf"^tiny/2ranks/short/{case} tokens_per_s: [\d.,e+]+ tokens/s beside ", told, re.M
        ), case
    for constant in ("fixed", "quadratic", "exchange_2", "gather", "groups", "launch"):
        assert f"tiny/2ranks/calibration {constant}: " in told


@pytest.mark.nightly
def test_steps_with_old_logprobs_are_measured_on_a_cpu() -> None:
    told = dry_run("--turns", "1", "--calibration-turns", "1", "--old-logprobs")
    assert "tiny/2ranks/short/longest-old-logprobs tokens_per_s: " in told


@pytest.mark.nightly
def test_one_rank_measures_what_runs_plan_by(tmp_path: Path) -> None:
    table = tmp_path / "costs.json"
    table.write_text("[]")
    told = dry_run(
        *("--calibration-turns", "1", "--write", "--out", str(tmp_path / "out.json"), "--table", str(table)),
        gpus=1,
    )
    assert "step and plans are not measured" in told
    off = re.search(
        r"^the constants are kept from runs: the model is (\d+)% off, and 15% may be$", told, re.M
    )
    if off is not None:  # on a CPU that does other things beside, as often as not
        assert int(off[1]) >= 15
        assert read_measured(table) == []
        return
    (row,) = read_measured(table)
    assert (row.device, row.exchange, row.layers) == ("cpu", (), 2)
    assert "--gpus 1" in row.command


@pytest.mark.nightly
def test_whole_steps_are_measured_on_a_cpu() -> None:
    told = dry_run("--turns", "1", "--calibration-turns", "1", "--step")
    assert "the steps of both sides agree: loss " in told
    assert re.search(
        r"^tiny/2ranks/short/step tokens_per_s: [\d.,e+]+ tokens/s beside .*aim: 1.15", told, re.M
    )


@pytest.mark.nightly
def test_random_plans_are_compared_on_a_cpu() -> None:
    told = dry_run("--plans", "10")
    for case, plans in (("dense/cp2", 3), ("experts/cp2-ep2", 3), ("dense/cp2-all_to_all", 4)):
        assert f"plans/{case} plans: {plans} plans" in told
