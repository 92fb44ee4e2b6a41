"""docs/metrics.md names the metrics that there are: those of a real run (tests/end_to_end/test_train.py), and all in the source."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.metrics_page import PAGE, named, undocumented

PACKAGE = Path(__file__).parents[1] / "quintet"
ROOMS = ("train", "controller", "observe")
FAMILIES = "reward|response_tokens|clip|kl|mismatch|dapo|critic|sync|rollout|routes|experts|plan|memory|eval"


@functools.cache
def texts() -> set[str]:
    return {
        node.value
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_metric_in_the_source_is_on_the_page() -> None:
    found = {one for one in texts() if re.fullmatch(rf"({FAMILIES})/[a-z_0-9]+", one)}
    assert len(found) > 25
    assert not undocumented(found)


def test_every_metric_on_the_page_is_in_the_source() -> None:
    """Whole, or its last word where the family's name is put before it."""
    there = texts()
    for name in named():
        if "<" not in name:
            assert name in there or name.rpartition("/")[2] in there, name


def test_every_phase_is_on_the_page() -> None:
    sources = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    phases = set(re.findall(r'phase\("([a-z]+)"\)', sources))
    listed = re.search(r"of the step by phase: (.*) \|", PAGE.read_text())
    assert len(phases) > 10
    assert listed is not None
    assert phases == set(re.sub(r" \(.*?\)", "", listed[1]).split(", "))


def test_the_page_would_miss_one() -> None:
    assert (
        undocumented(
            {"step", "loss", "reward/mine", "seconds/generate", "eval/pass_at_8", "mismatch/ratio_p99.9"}
        )
        == set()
    )
    assert undocumented({"losss", "reward", "critic/entropy", "mismatch/ratio_p99x9"}) == {
        "losss",
        "reward",
        "critic/entropy",
        "mismatch/ratio_p99x9",
    }
