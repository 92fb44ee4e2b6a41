"""Recipes written to files, and the text of the error they give."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quintet.errors import UserError
from quintet.recipe import Recipe, load_recipe

VALID = """\
model:
  build:
    layers: 4
data:
  task: addition
"""

Load = Callable[..., Recipe]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a recipe from text (a valid one by default) with overrides."""

    def load(*overrides: str, text: str = VALID, command: str = "train") -> Recipe:
        file = tmp_path / "r.yaml"
        file.write_text(text)
        return load_recipe(file, overrides, command=command)

    return load


@pytest.fixture
def refuse(load: Load) -> Callable[..., str]:
    """The message with which a recipe is refused."""

    def refuse(*overrides: str, **options: str) -> str:
        with pytest.raises(UserError) as caught:
            load(*overrides, **options)
        return str(caught.value)

    return refuse
