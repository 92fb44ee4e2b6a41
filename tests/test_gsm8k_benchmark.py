"""The benchmark that ends with a better model: what it makes of answers, what it asks for, and its plumbing on a CPU."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gsm8k, gsm8k_page
from benchmarks.paired import RESAMPLES, paired_bootstrap
from benchmarks.records import check
from quintet.recipe.loader import load_recipe
from tests.benchmark_runs import benchmark


def lines(greedy: list[bool], *rounds: list[bool]) -> list[dict[str, Any]]:
    """What an evaluation writes to samples.jsonl."""
    return [
        {
            "kind": kind,
            "prompt": f"question {i}",
            "answer": str(i),
            "response": f"{kind} {i}",
            "correct": right,
            "finish": "stop" if right else "length",
        }
        for kind, of in [*(("eval", one) for one in rounds), ("greedy", greedy)]
        for i, right in enumerate(of)
    ]


def row(greedy: list[bool], *rounds: list[bool]) -> gsm8k.Row:
    return gsm8k.row_of(lines(greedy, *rounds), {"response_tokens": 5.0}, 1.0)


def test_a_row_has_each_question_s_answers() -> None:
    found = row([True, False, False], [True, False, True], [False, False, True])
    assert found.right == {"greedy": [1.0, 0.0, 0.0], "sampled": [0.5, 0.0, 1.0]}
    assert found.responses == ["greedy 0", "greedy 1", "greedy 2"]
    assert found.truncated == pytest.approx(5 / 9)
    with pytest.raises(AssertionError, match="same questions"):
        gsm8k.row_of(lines([True, False, False], [True, False]), {"response_tokens": 5.0}, 1.0)


def test_the_bootstrap_is_of_pairs() -> None:
    before = [float(i % 10 == 0) for i in range(400)]
    better = [float(i % 10 in (0, 1)) for i in range(400)]
    sure = paired_bootstrap(before, better)
    assert sure.mean == pytest.approx(0.1)
    assert sure.low < 0.1 < sure.high
    assert sure.p == 1 / (1 + RESAMPLES)
    assert sure == paired_bootstrap(before, better)
    # As many right ones, of other questions: nothing is shown.
    assert paired_bootstrap(before, [*before[5:], *before[:5]]).p > 0.3
    assert paired_bootstrap(before, before).p == 1
    # 6 of 8 that differ: the binomial's p is 37/256.
    few = [1.0] * 6 + [0.0] * 2 + [0.0] * 392
    assert 0.05 < paired_bootstrap([0.0] * 6 + [1.0] * 2 + [0.0] * 392, few).p < 0.145
    with pytest.raises(ValueError, match="no pairs"):
        paired_bootstrap([1.0], [])


def test_ten_questions_are_shown_half_of_them_newly_right() -> None:
    nothing = [False] * 100
    new = [60 <= i < 70 for i in range(100)]
    rows = {gsm8k.LOADED: row(nothing, new), gsm8k.WARM: row(nothing, new), gsm8k.TRAINED: row(new, new)}
    assert gsm8k.chosen(rows) == [0, 20, 40, 60, 61, 62, 63, 64, 65, 80]
    shown = gsm8k.shown(rows)
    assert [one["responses"][gsm8k.TRAINED]["right"] for one in shown] == [
        one in range(60, 66) for one in gsm8k.chosen(rows)
    ]
    rows[gsm8k.TRAINED] = row(nothing, new)
    assert gsm8k.chosen(rows) == list(range(0, 100, 10))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "--model is missing"),
        (["--model", "nowhere"], "--model: there is no nowhere"),
        (["--tiny", "--train", "a.jsonl"], "leave --train out"),
        (["--tiny", "lora"], "lora: expected key=value"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gsm8k.arguments(words)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_commands_of_records_can_be_given_as_they_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("smollm2-135m", "gsm8k_train.jsonl", "gsm8k_test.jsonl"):
        Path(file).touch()
    told = {one["command"] for one in json.loads(gsm8k_page.FILE.read_text())}
    args = [gsm8k.arguments(shlex.split(one)[3:]) for one in sorted(told)]
    assert [str(one.out) for one in args] == [f"runs/gsm8k/smollm2-135m/{one}" for one in ("lora", "full")]


@pytest.mark.parametrize("lora", [False, True])
def test_the_recipe_is_sound_with_adapters_and_without(lora: bool, tmp_path: Path) -> None:
    args = gsm8k.arguments(["--tiny", "--out", str(tmp_path), *(["--lora"] if lora else []), "train.steps=7"])
    recipe = load_recipe(gsm8k.RECIPE, gsm8k.words_of(args, tmp_path))
    assert (recipe.lora is not None) == lora
    assert recipe.train.steps == 7
    assert recipe.sft is not None


def test_a_run_takes_the_place_of_the_last_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gsm8k_page.PAGE.read_text(encoding="utf-8")
    assert gsm8k_page.page([], before) == before
    monkeypatch.setattr(gsm8k_page, "section", lambda told: f"## {told}\nanew\n\n## of an answer\n")
    adapters = before.index("## Adapters alone (LoRA)")
    assert (
        gsm8k_page.page(["Adapters alone (LoRA)"], before)
        == (  # type: ignore[list-item]
            before[:adapters] + "## Adapters alone (LoRA)\nanew\n\n## of an answer\n"
        )
    )
    made = gsm8k_page.page(["All weights"], before)  # type: ignore[list-item]
    assert made.endswith("anew\n\n## of an answer\n\n" + before[adapters:])
    old = [{"case": "m/full/grpo/steps1-2"}, {"case": "m/lora/grpo"}, {"case": "m/full/loaded"}]
    assert gsm8k_page.replaced(old, [{"case": "m/full/grpo"}]) == [old[1], {"case": "m/full/grpo"}]


@pytest.mark.nightly
def test_a_run_is_judged_on_a_cpu(tmp_path: Path) -> None:
    printed = benchmark("gsm8k", "--tiny", "--out", str(tmp_path), "--limit-s", "0.5")
    assert "the time is up after 1 steps of 3" in printed
    told = json.loads((tmp_path / "gsm8k.json").read_text())
    for one in told["records"]:
        check(one)
    found = {(one["case"], one["metric"]): one for one in told["records"]}
    after = found["tiny/full/grpo", "greedy_accuracy"]
    assert after["baseline"] == found["tiny/full/warm-up", "greedy_accuracy"]["value"]
    assert found["tiny/full/loaded", "greedy_accuracy"]["baseline"] is None
    assert 0 < found["tiny/full/grpo", "sampled_p"]["value"] <= 1
    assert [one["step"] for one in told["curve"]["rl"]] == [1]
    assert len(told["curve"]["sft"]) == 3
    assert len(told["samples"]) == gsm8k.SHOWN
    assert set(told["samples"][0]["responses"]) == {gsm8k.LOADED, gsm8k.WARM, gsm8k.TRAINED}
    page = gsm8k_page.page([told])
    assert "| after GRPO | 0.00% | 0.00% |" in page
    assert page.count("<details>") == gsm8k.SHOWN
    assert "| 1–1 |" in page
