"""The benchmarks' plumbing: records that can be trusted, and work that both sides share."""

import math
import statistics

import pytest

from benchmarks.laptop_cases import CASES, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT
from benchmarks.records import RESULTS, merged, read_records, record, write_records


def sound(**changes):
    return {**record("b", "short/trl", "samples_per_s", 2.0, "samples/s"), **changes}


def test_a_new_record_replaces_that_of_the_same_case_metric_and_hardware(tmp_path) -> None:
    file = tmp_path / "b.json"
    write_records(file, [sound(value=1.0), sound(case="long/trl", baseline=3.0)])
    write_records(file, merged(file, [sound(value=5.0), sound(hardware="H200")]))
    found = [(one["case"], one["value"], one["baseline"]) for one in read_records(file)]
    assert found == [("short/trl", 5.0, None), ("long/trl", 2.0, 3.0), ("short/trl", 2.0, None)]


@pytest.mark.parametrize(
    "changes",
    [
        {"value": math.nan},
        {"value": "2"},
        {"value": None},
        {"baseline": math.inf},
        {"unit": ""},
        {"versions": {}},
        {"date": "soon"},
        {"note": "a key too many"},
    ],
)
def test_a_record_that_is_not_sound_is_refused(changes, tmp_path) -> None:
    with pytest.raises(ValueError):
        write_records(tmp_path / "b.json", [sound(**changes)])


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
