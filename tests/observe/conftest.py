"""A recipe to observe, and an observer whose console can be read."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from quintet.observe.observer import Observer
from quintet.recipe.schema import BuildModel, Data, Model, Recipe, Run


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(
        run=Run(name="test", dir=tmp_path / "runs"),
        model=Model(build=BuildModel(layers=3)),
        data=Data(task="addition"),
    )


@pytest.fixture
def observe(recipe: Recipe) -> Callable[..., tuple[Observer, io.StringIO]]:
    """An observer, and what it prints."""

    def make(**options: object) -> tuple[Observer, io.StringIO]:
        printed = io.StringIO()
        return Observer(recipe, Console(file=printed, highlight=False, **options)), printed

    return make
