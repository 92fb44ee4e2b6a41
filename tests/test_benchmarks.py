"""The benchmarks' plumbing: records that can be trusted, and work that both sides share."""

import json
import math
import statistics

import pytest

from benchmarks.laptop_cases import CASES, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT
from benchmarks.records import RESULTS, Record, read_records, write_records


def record(**changes) -> Record:
    fixed = {
        "hardware": "CPU, 2 cores",
        "versions": {"python": "3.11"},
        "commit": "abc",
        "date": "2026-11-21",
    }
    values = {"bench": "b", "case": "short/trl", "metric": "samples_per_s", "value": 2.0, "unit": "samples/s"}
    return Record(**{**values, **fixed, "command": "make bench", **changes})


def test_records_are_merged_by_case_metric_and_hardware(tmp_path) -> None:
    write_records([record(value=1.0), record(case="long/trl", baseline=3.0)], tmp_path)
    (file,) = write_records([record(value=5.0), record(hardware="H200")], tmp_path)
    assert file == tmp_path / "b.json"
    found = {(r.case, r.hardware): (r.value, r.baseline) for r in read_records(file)}
    assert found == {
        ("short/trl", "CPU, 2 cores"): (5.0, None),
        ("short/trl", "H200"): (2.0, None),
        ("long/trl", "CPU, 2 cores"): (2.0, 3.0),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"value": math.nan},
        {"value": "2"},
        {"baseline": math.inf},
        {"unit": ""},
        {"versions": {}},
        {"date": "soon"},
    ],
)
def test_a_record_that_says_nothing_is_refused(changes) -> None:
    with pytest.raises(ValueError):
        record(**changes)


def test_a_file_with_other_keys_is_refused(tmp_path) -> None:
    file = tmp_path / "b.json"
    file.write_text(json.dumps([{"bench": "b", "value": 1}]))
    with pytest.raises(ValueError, match="each record has the keys"):
        read_records(file)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_committed_results_are_valid(file) -> None:
    assert read_records(file)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_work_is_the_same_each_time_and_within_its_bounds(case) -> None:
    work = case.work()
    assert work == case.work()
    assert len(work["prompts"]) == PROMPTS_PER_STEP * len(work["lengths"])
    assert {len(step) for step in work["lengths"]} == {PROMPTS_PER_STEP * SAMPLES_PER_PROMPT}
    lengths = [length for step in work["lengths"] for length in step]
    assert case.shortest <= min(lengths) <= max(lengths) <= case.longest


def test_long_tail_is_log_normal() -> None:
    logs = [math.log(length) for step in CASES["long_tail"].lengths() for length in step]
    low, high = math.log(8), math.log(256)
    assert statistics.mean(logs) == pytest.approx((low + high) / 2, abs=0.05)
    # Two standard deviations reach the bounds; redrawing what falls outside narrows it to 0.88 of that.
    assert statistics.stdev(logs) == pytest.approx(0.88 * (high - low) / 4, rel=0.05)
