"""The report: whole without anything else, honest about gaps, and never in the way of a run that broke."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quintet.errors import UserError
from quintet.observe import report
from quintet.observe.report import figures, make_anew, write_report
from quintet.observe.report.svg import MOST_POINTS, Plot, Series, _thin, render, running_mean
from quintet.recipe.loader import dump_resolved
from quintet.recipe.schema import Recipe, Run, Sft, SftOptimizer
from quintet.recipe.yaml_text import read_yaml

VOID = {"meta", "link", "br", "img", "input"}


class Balance(HTMLParser):
    """Every tag that opens closes in order, and nothing points outside the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in ("link", "img", "iframe")
        assert not {name for name, _ in attributes} & {"src", "href", "xlink:href"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(report: Path) -> str:
    text = report.read_text()
    page = Balance()
    page.feed(text)
    assert page.open == []
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
        assert "nan" not in re.sub(r'data-hover="[^"]*"', "", svg)
    return " ".join(page.text)


def ledger(directory: Path, lines: list[dict]) -> None:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def step(number: int, **metrics: object) -> dict:
    return {
        "stage": "rl",
        "step": number,
        "reward/mean": 0.1,
        "seconds/step": 0.5,
        "seconds/train": 0.4,
        **metrics,
    }


def test_a_whole_run(tmp_path: Path) -> None:
    ledger(
        tmp_path,
        [
            *({"stage": "sft", "step": i, "loss": 1 / i, "lr": 0.1} for i in range(1, 50)),
            {"stage": "rl", "step": 0, "eval/accuracy": 0.2, "eval/greedy": 0.3, "seconds/evaluate": 1.0},
            *(step(i, tokens=100, **{"mismatch/kl_k3": 10.0**-i}) for i in range(1, 8)),
        ],
    )
    (tmp_path / "recipe.yaml").write_text(
        dump_resolved(Recipe(sft=Sft(optimizer=SftOptimizer(warmup_steps=7))))
    )
    sample = {"step": 1, "prompt": "<script>alert(1)</script>", "response": "a & b", "reward": 1.0}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (tmp_path / "environment.json").write_text(
        json.dumps({"versions": {"torch": "2.13.0"}, "command": "quintet train x"})
    )
    summary = {
        "status": "finished",
        "eval_before": 0.2,
        "eval_after": 0.5,
        "seconds_total": 9,
        "seconds_by_phase": {"train": 3},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    text = check(write_report(tmp_path))
    html = (tmp_path / "report.html").read_text()
    for said in (
        "finished",
        "50.0%",
        "+30.0",
        "Held-out accuracy",
        "Supervised warm-up",
        "torch",
        "2.13.0",
        "quintet train x",
    ):
        assert said in text
    assert "<script>alert" not in html
    assert [one["prompt"] for one in samples_of(html)] == ["<script>alert(1)</script>"]
    assert re.findall(r'class="set">([^<]*)<', html) == ["    warmup_steps: 7"]


@pytest.mark.parametrize("lines", [[], [step(1)], [step(1), step(2)]])
def test_a_run_cut_off_early_with_nothing_but_its_ledger(tmp_path: Path, lines: list[dict]) -> None:
    ledger(tmp_path, lines)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 3, "rew')
    (tmp_path / "summary.json").write_text('{"status": "fin')
    (tmp_path / "recipe.yaml").write_text("run: [")
    assert "unfinished" in check(write_report(tmp_path))


def samples_of(html: str) -> list[dict]:
    """The samples that a page shows, each with its prompt."""
    found = re.search(r'<script type="application/json" id="samples-data">(.*?)</script>', html)
    assert found
    data = json.loads(found[1])
    return [one | {"prompt": data["prompts"][one["prompt"]]} for one in data["samples"]]


def test_all_samples_are_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "step": step,
            "kind": kind,
            "prompt": f"{n}+1=",
            "response": "</script><!--\u2028" * 3,
            "reward": 0.5,
            "correct": right,
        }
        for step in range(100)
        for kind, n, right in (("train", step, None), ("eval", 0, True), ("greedy", 0, False))
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    check(tmp_path / "report.html")
    bare = [{key: value for key, value in row.items() if value is not None} for row in rows]
    assert samples_of(page) == bare
    assert page.count('"0+1="') == 1, "a prompt that comes again is in the page once"

    monkeypatch.setattr("quintet.observe.report.samples.MOST_CHARACTERS", 30_000)
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "in this page, of 300 in samples.jsonl" in page
    steps = [one["step"] for one in samples_of(page)]
    assert steps[-1] == 99, "the last step's stay"
    assert {steps.count(step) for step in steps} == {3}
    assert len({b - a for a, b in pairwise(sorted(set(steps)))}) == 1


def test_what_a_killed_run_left_is_told_anew(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_resolved(Recipe()))
    first = {"stage": "rl", "step": 0, "eval/accuracy": 0.25, "seconds/evaluate": 1.0}
    ledger(tmp_path, [first, *(step(number, loss=1.0) for number in (1, 2, 3))])
    summary = {
        "status": "running",
        "ledger_lines": 2,
        "seconds_total": 10.0,
        "seconds_by_phase": {"train": 0.4, "start": 8.0},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"failed_saves": 1}))
    assert make_anew(tmp_path) == tmp_path / "report.html"
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["status"], told["steps"], told["eval_before"], told["failed_saves"]) == (
        "unfinished",
        3,
        0.25,
        1,
    )
    assert told["seconds_total"] == pytest.approx(11.0)
    assert told["seconds_by_phase"] == pytest.approx({"train": 1.2, "start": 8.0})
    assert "unfinished" in check(tmp_path / "report.html")
    make_anew(tmp_path)
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again | {"written": ""} == told | {"written": ""}, "once more comes to the same"


def test_a_recipe_is_read_once_for_all_reports_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its YAML is most of what a report takes, and another run's is another."""
    read = []
    monkeypatch.setattr(report, "read_yaml", lambda text, name: read.append(text) or read_yaml(text, name))
    pages = []
    for name in ("one", "two", "two"):
        text = dump_resolved(Recipe(run=Run(name=f"run of {name}")))
        (tmp_path / "recipe.yaml").write_text(text)
        pages.append(write_report(tmp_path).read_text())
    assert len(read) == 2
    assert ["run of one" in page for page in pages] == [True, False, False]
    assert ["run of two" in page for page in pages] == [False, True, True]


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no run directory: there is no recipe\.yaml in it"):
        make_anew(tmp_path)


def test_what_is_explained_is_a_figure() -> None:
    script = Path(figures.__file__).with_name("hover.js").read_text()
    explained = set(re.findall(r'^  "([^"]+)": "', script, re.MULTILINE))
    keys = dict.fromkeys(re.findall(r'"([\w/]+)"', Path(figures.__file__).read_text()), 1.0)
    lines = [{"stage": "rl", "step": n, **keys, "eval/reward": n} for n in (1, 2)]
    assert explained - {plot.title for plot in figures.main_plots(lines)} == set()
    assert len(explained) > 9


def test_an_empty_directory(tmp_path: Path) -> None:
    check(write_report(tmp_path))


values = st.none() | st.floats() | st.integers(-(10**6), 10**6)


@given(st.lists(values, min_size=1, max_size=60), st.booleans(), st.booleans(), st.booleans())
@example([1.0, 5e-324], True, False, False)  # less than the smallest power of ten there is
def test_any_numbers_can_be_drawn(y: list, log: bool, from_zero: bool, smooth: bool) -> None:
    series = [Series("a", list(range(len(y))), y, smooth=smooth)]
    figure = render(Plot("t", series, log=log, from_zero=from_zero))
    if figure:
        svg = re.search(r"<svg.*</svg>", figure)
        assert svg is not None
        root = ElementTree.fromstring(svg[0])
        for path in root.iter("path"):
            numbers = [float(one) for one in re.findall(r"-?[\d.]+", path.get("d") or "")]
            assert all(-1 <= one <= 461 for one in numbers)


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=200))
def test_stacked_bars_stay_in_the_frame(rows: list[list[float]]) -> None:
    x = list(range(len(rows)))
    figure = render(Plot("t", [Series(str(i), x, [row[i] for row in rows]) for i in range(3)], stacked=True))
    for y, height in re.findall(
        r'<rect class="c\d" x="[^"]*" y="([^"]*)" width="[^"]*" height="([^"]*)"', figure
    ):
        assert float(y) >= 9.9
        assert float(height) >= 0
        assert float(y) + float(height) <= 204.2


def test_a_gap_breaks_the_line() -> None:
    figure = render(Plot("t", [Series("a", [1, 2, 3, 4], [1.0, None, 2.0, 3.0])]))
    path = re.search(r' d="([^"]*)"', figure)
    assert path is not None
    assert path[1].count("M") == 2


def test_thinning_keeps_spikes() -> None:
    points = [(float(i), 100.0 if i == 5000 else 0.0) for i in range(10_000)]
    thinned = _thin(points)
    assert len(thinned) <= MOST_POINTS + 2
    assert (5000.0, 100.0) in thinned
    assert thinned == sorted(thinned)


def test_running_mean_is_centred_and_skips_gaps() -> None:
    assert running_mean([0.0, 3.0, None, 6.0], 3) == [1.5, 1.5, 4.5, 6.0]
    assert running_mean([0.0, 3.0, None, 6.0], 3, 2) == [1.5, 4.5]
