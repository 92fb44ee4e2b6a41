"""`make test-gpu`: which benchmarks run on how many GPUs, and that a slower one fails against its record."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import CHECKS, FILES, Check, chosen, judged, recorded, status_of
from benchmarks.records import RESULTS, ROOT, middle, read_records, record, write_records

CARD = "1 x NVIDIA H200"
ENGINE = CHECKS[0]
ROLLOUT = next(one for one in CHECKS if one.beside)


def kept(check: Check, value: float, baseline: float | None, **changes: Any) -> dict[str, Any]:
    of_check = record(check.part, check.case, check.metric, value, check.unit, baseline=baseline)
    return of_check | {"hardware": CARD, "commit": "abc1234"} | changes


def at(*ratios: float) -> list[tuple[float, float]]:
    """Repeats of these ratios; the machine's own speed differs between them, which must not matter."""
    return [(1000.0 * n * ratio, 1000.0 * n) for n, ratio in enumerate(ratios, start=1)]


@pytest.mark.parametrize(("loss", "passes"), [(0.09, False), (0.07, True), (-0.5, True)])
def test_more_than_8_percent_below_the_record_fails(loss: float, passes: bool) -> None:
    ours = 1.04 * (1 - loss)
    passed, line = judged(ENGINE, at(ours, ours, ours), CARD, kept(ENGINE, 3120.0, 3000.0))
    assert passed is passes
    assert f"engine qwen2.5-1.5b/te: {2000 * ours:,.4g} tokens/s, {ours:.3f} of the baseline" in line
    assert f"{-loss:+.1%} against the record's 1.040" in line
    assert ("commit abc1234" in line and "make test-gpu PART=engine ARGS=--record" in line) is not passes


def test_the_median_of_the_repeats_counts() -> None:
    assert judged(ENGINE, at(0.5, 1.0, 1.01), CARD, kept(ENGINE, 3000.0, 3000.0))[0]
    assert not judged(ENGINE, at(0.5, 0.9, 1.01), CARD, kept(ENGINE, 3000.0, 3000.0))[0]
    value, baseline = middle(at(0.5, 0.9, 1.01))
    assert value / baseline == pytest.approx(0.9)


def test_a_faster_host_that_the_baseline_alone_gains_by_fails_nothing() -> None:
    repeats = [(960.0, 800.0)] * 3
    assert judged(ROLLOUT, repeats, CARD, kept(ROLLOUT, 1000.0, 500.0))[0]
    assert not judged(ROLLOUT, repeats, CARD, kept(ROLLOUT, 1100.0, 500.0))[0]


def test_without_a_record_a_check_fails_and_says_how_to_make_one() -> None:
    passed, line = judged(ENGINE, at(1.0, 1.0, 1.0), "1 x NVIDIA B200", None)
    assert not passed
    assert "no record of 1 x NVIDIA B200" in line
    assert line.endswith("make test-gpu PART=engine ARGS=--record writes it")


def test_a_record_is_of_the_same_card_and_of_the_same_comparison() -> None:
    ours = kept(ROLLOUT, 9.0, 10.0)
    alone = kept(ROLLOUT, 10.0, None, case=ROLLOUT.beside)
    assert recorded(ROLLOUT, CARD, [ours, alone]) == ours
    assert recorded(ROLLOUT, "1 x NVIDIA B200", [ours, alone]) is None
    assert recorded(ROLLOUT, CARD, [ours]) is None
    assert recorded(ROLLOUT, CARD, [ours | {"baseline": 5.0}, alone]) is None
    assert recorded(ROLLOUT, CARD, [ours | {"baseline": None}, alone]) is None


def test_gpus_decide_which_cases_run() -> None:
    one, told = chosen(CHECKS, gpu_check.PARTS, 1)
    assert len(one) == 5
    assert told == ["sync qwen3-30b-a3b/2gpu: not run, it needs 2 GPUs and 1 were found"]
    assert chosen(CHECKS, gpu_check.PARTS, 2) == (list(CHECKS), [])
    assert {check.part for check in chosen(CHECKS, ["sync"], 4)[0]} == {"sync"}


def test_parts_of_tests_run_tests_that_there_are_one_process_each(monkeypatch) -> None:
    ran: dict[str, list[str]] = {}
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: name)
    for part, tests in gpu_check.TESTS.items():
        names = ran.setdefault(part, [])
        monkeypatch.setattr(gpu_check, "status_of", lambda command, _, names=names: names.append(command[-1]))
        assert tests(part, 1, gpu_check.arguments(["--part", part]))[1] == []
    for file, _, test in [one.partition("::") for names in ran.values() for one in names]:
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text()
    on_gpus = re.compile(r"skipif\(not torch\.cuda\.is_available\(\)")
    engine = (
        file for file in (ROOT / "tests" / "engine").glob("test_*.py") if on_gpus.search(file.read_text())
    )
    assert {f"tests/engine/{file.name}" for file in engine} <= {*ran["kernels"]}
    of_vllm = [one for part in ("scheduler", "vllm", "kills") for one in ran[part]]
    assert {f"tests/rollout/vllm/test_{one}.py" for one in ("offline", "update", "deaths")} < {*of_vllm}
    assert {*re.findall(r"vllm/(test_routes\.py)::test_", " ".join(of_vllm))} == {"test_routes.py"}


def test_of_a_part_of_tests_the_one_that_fails_is_named(monkeypatch) -> None:
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: name)
    failing = "tests/rollout/vllm/test_update.py"
    monkeypatch.setattr(gpu_check, "status_of", lambda command, _: "too long" * (command[-1] == failing))
    found = gpu_check.TESTS["vllm"]("vllm", 1, gpu_check.arguments(["--part", "vllm"]))
    assert found == ([], [f"vllm: {failing}: too long"])


def test_what_a_machine_lacks_for_a_part_of_tests_is_named(monkeypatch) -> None:
    """A package, with what brings it; more GPUs, by pytest, with its reason to skip."""
    ran: list[list[str]] = []
    monkeypatch.setattr(gpu_check, "status_of", lambda command, _: ran.append([*command]))
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: name)
    gpu_check.TESTS["kills"]("kills", 1, gpu_check.arguments(["--part", "kills"]))
    assert all("-rs" in command for command in ran)
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    for part, brings in (("kernels", "."), ("kills", "'.[vllm]'"), ("sglang", "'.[sglang]'")):
        _, (wrong,) = gpu_check.TESTS[part](part, 1, gpu_check.arguments(["--part", part]))
        assert wrong.endswith(f"is not installed here: pip install -e {brings}")


def test_make_runs_each_part() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"\ntest-gpu: PART := {' '.join(gpu_check.PARTS)}\n" in makefile
    assert f"a part: PART={', '.join(gpu_check.PARTS)} (all unless named)" in makefile
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert all(f"`{part}`" in page for part in gpu_check.PARTS)


def test_cases_are_those_of_the_committed_records() -> None:
    for check in CHECKS:
        cases = {(r["case"], r["metric"], r["hardware"]) for r in read_records(RESULTS / FILES[check.part])}
        assert (check.case, check.metric, f"{check.gpus} x NVIDIA H200") in cases


def test_what_is_slower_fails_until_it_is_recorded(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    both = CHECKS[:2]
    write_records(tmp_path / FILES["engine"], [kept(check, 1e4, 1e4) for check in both])

    def planted(checks: list[Check], *_: object) -> list[dict[str, Any]]:
        return [
            {"repeats": at(*[ratio] * 3), "records": [kept(check, ratio, 1.0)]}
            for check, ratio in zip(checks, (0.91, 0.93), strict=True)
        ]

    monkeypatch.setattr(gpu_check, "measured", planted)
    assert gpu_check.main(["--part", "engine", "--out", str(tmp_path / "out.json")]) == 1
    (wrong,) = re.findall("FAILED (.*)", capsys.readouterr().out)
    assert wrong.startswith("engine qwen2.5-1.5b/te: ")
    assert [one["value"] for one in read_records(tmp_path / "out.json")] == [0.91, 0.93]
    assert gpu_check.main(["--part", "engine", "--record"]) == 0
    assert gpu_check.main(["--part", "engine"]) == 0
    monkeypatch.setattr(gpu_check, "measured", lambda *_: "exit status 1, the error is above")
    assert gpu_check.main(["--part", "engine"]) == 1
    assert "FAILED engine qwen2.5-1.5b/portable: not measured: exit status 1" in capsys.readouterr().out


def test_a_part_ends_at_its_time_limit() -> None:
    assert status_of(["this"], 60) == ""
    assert status_of(["benchmarks.no_such"], 60) == "exit status 1, the error is above"
    assert status_of(["timeit", "-n1", "-r1", "import time; time.sleep(60)"], 0.5) == "the part took too long"


@pytest.mark.nightly
def test_all_benchmarks_take_turns_on_a_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--tiny"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "steps: killed, resumed, and better than before training" in done.stdout
    for check in gpu_check.TINY:
        (repeats,) = re.findall(rf"{check.name}: .*\(repeats: ([^)]*)\)", done.stdout)
        assert len(repeats.split(", ")) == gpu_check.REPEATS
