"""quintet from Python: what is handed on, what a run tells, and that the page and the notebook run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quintet import api
from quintet.errors import UserError
from quintet.recipe.schema import Recipe
from tests.models.directory import write_model

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "recipes" / "laptop_demo.yaml"


@pytest.fixture
def run(tmp_path: Path) -> api.Run:
    (tmp_path / "recipe.yaml").touch()
    return api.Run(tmp_path)


def test_a_run_reads_its_files_anew(run: api.Run) -> None:
    assert (run.metrics, run.samples, run.summary) == ([], [], {})
    (run.directory / "metrics.jsonl").write_text('{"stage": "rl", "step": 1, "loss": "inf"}\n')
    (run.directory / "samples.jsonl").write_text('{"step": 1, "prompt": "1+1="}\n{"step": 2, "pro')
    (run.directory / "summary.json").write_text('{"steps": 1}')
    assert run.metrics == [{"stage": "rl", "step": 1, "loss": float("inf")}]
    assert run.samples == [{"step": 1, "prompt": "1+1="}]
    assert run.summary == {"steps": 1}
    assert "no report yet" in run._repr_html_()
    (run.directory / "report.html").write_text('<svg class="a">')
    assert '<iframe srcdoc="&lt;svg class=&quot;a&quot;&gt;"' in run._repr_html_()


def test_a_directory_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run directory"):
        api.Run(tmp_path / "typo")


def test_train_hands_on_the_recipe_and_returns_the_run(run: api.Run, monkeypatch: Any) -> None:
    seen: list[Recipe] = []
    monkeypatch.setattr("quintet.train.ppo.train", lambda recipe: seen.append(recipe) or run.directory)
    told = api.train(
        DEMO, sft=None, optimizer={"lr": 1e-6}, data={"system_prompt": None}, **{"train.steps": 11}
    )
    assert told == run
    assert (seen[0].sft, seen[0].optimizer.lr, seen[0].train.steps) == (None, 1e-6, 11)
    assert seen[0].optimizer.beta2 == 0.95, "the file's other keys of the section are kept"
    with pytest.raises(UserError, match=r"train\.stepz"):
        api.train(DEMO, train={"stepz": 3})


def test_a_finished_run_is_returned_as_it_is(run: api.Run, monkeypatch: Any) -> None:
    monkeypatch.setattr("quintet.runs.resume.nothing_left", lambda recipe, command: run.directory)
    monkeypatch.setattr("quintet.train.ppo.train", None)
    assert api.train(DEMO) == run


def test_generate_needs_no_recipe(tmp_path: Path, monkeypatch: Any) -> None:
    model = write_model(tmp_path / 'a "model" ü')
    (model / "tokenizer.json").touch()
    seen: list[Any] = []
    monkeypatch.setattr("quintet.train.generate.generate", lambda *given: seen.append(given) or ["made"])
    assert api.generate(model, ["1+1="], rollout={"temperature": 0}) == ["made"]
    recipe, prompts = seen[0]
    assert (recipe.model.path, recipe.rollout.temperature, recipe.rollout.samples_per_prompt) == (model, 0, 1)
    assert prompts == ["1+1="]
    assert api.generate(model, []) == []
    with pytest.raises(UserError, match=r"takes a list of prompts; of one alone it is \['1\+1='\]"):
        api.generate(model, "1+1=")
    with pytest.raises(UserError, match="nowhere"):
        api.generate(tmp_path / "nowhere", ["1+1="])


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: Any) -> None:
    """A directory with the recipes, where runs may be left."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)


@pytest.mark.nightly
@pytest.mark.usefixtures("checkout")
def test_the_notebook_runs() -> None:
    book = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    place: dict[str, Any] = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "cleared, so that it tells nothing old"
            exec("".join(cell["source"]), place)
    assert place["run"].summary["steps"] == 25
    assert place["run"]._repr_html_().count("&lt;svg") > 5
    assert [one["prompt"] for one in place["answers"]] == ["123+456=", "964+494="]
    assert all(one["response"] for one in place["answers"])


@pytest.mark.nightly
@pytest.mark.usefixtures("checkout")
def test_the_page_runs() -> None:
    place: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, place)
    assert len(place["rewards"]) == 12
    assert len(place["samples"]) == 2
