"""The package stays small: limits on lines of code, by room, and on the keys of a recipe."""

from __future__ import annotations

import pytest

from tools.code_lines import by_file, by_room, code_lines, recipe_keys

MOST_LINES = {"quintet": 35_653, "observe": 1_518, "sync": 1_454}
"""Of today; the aim is 26,800."""
MOST_RECIPE_KEYS = 164
SHORTEN = "take out what is there twice before more goes in (python tools/code_lines.py --files)"


@pytest.mark.parametrize(("room", "most"), MOST_LINES.items())
def test_lines_of_code(room: str, most: int) -> None:
    rooms = by_room(by_file())
    count = sum(rooms.values()) if room == "quintet" else rooms[room]
    assert count <= most, f"{room} has {count} lines of code: {SHORTEN}"


def test_keys_of_a_recipe() -> None:
    keys = recipe_keys()
    assert len(keys) <= MOST_RECIPE_KEYS, f"a recipe has {len(keys)} keys; which can be told from others?"


def test_what_is_code() -> None:
    source = '''"""A docstring
of two lines."""

# a comment
SIZE = 1  # code, with a comment
"""Of an attribute."""
TEXT = """a value
counts whole"""


def f(
    x: int,
) -> int:
    """None."""
    return x
'''
    assert code_lines(source) == 1 + 2 + 3 + 1


def test_a_key_of_a_class_counts_once() -> None:
    keys = recipe_keys()
    assert len(keys) == len(set(keys))
    assert "Optimizer.lr" in keys
    assert "SftOptimizer.lr" not in keys
    assert "Recipe.resume" in keys
    assert "Recipe.optimizer" not in keys
