"""The first line of a public docstring names its object, a function's in the imperative."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import quintet

ROOT = Path(quintet.__file__).parents[1]

NO_VERBS = (
    "A After All Always An Another Any As At Before Between Both By Called Decorator Each Either Every Everything For From How If "
    "In It Its Most No Nobody None Nothing Of On One Once Only Raises Returns See Some That The Their There These They This Those "
    "Two Until Up What When Where Whether Which While Who Whoever Whose With Within Without Yields"
)
"""First words of descriptions, where a function's docstring has a verb in the imperative."""
NO_NAMES = "As Of On See Whose With"
"""First words of what can be understood only beside something else."""


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of what has a docstring that breaks the rule."""

    def look(node: ast.AST) -> Iterator[tuple[int, str]]:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if one.name.startswith("_"):
                    continue
                marks = {ast.unparse(mark) for mark in one.decorator_list}
                told = isinstance(one, ast.ClassDef) or marks & {"property", "cached_property"}
                text = (ast.get_docstring(one) or "Has none.").split()
                # A rule of the recipe is the sentence that users are told.
                if "rule" not in marks and text[0].strip(",:;") in (NO_NAMES if told else NO_VERBS).split():
                    yield one.lineno, one.name
            if isinstance(one, ast.ClassDef | ast.If | ast.Try):
                yield from look(one)

    return look(ast.parse(source))


def test_first_lines() -> None:
    files = [file.relative_to(ROOT) for file in sorted((ROOT / "quintet").rglob("*.py"))]
    assert len(files) > 200
    found = [f"{file}:{line}: {name}" for file in files for line, name in faults((ROOT / file).read_text())]
    assert not found, f"say in the imperative what these do, in a line that needs no neighbour: {found}"


def test_reading_orders_name_what_is_there() -> None:
    for file in (ROOT / "quintet").rglob("__init__.py"):
        _, _, order = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("Reading order: ")
        for name in re.findall(r"`([\w.]+)`", order):
            beside = ROOT / name.replace(".", "/") if "." in name else file.parent / name
            assert beside.is_dir() or beside.with_suffix(".py").exists(), f"{file}: {name}"


def test_what_is_found() -> None:
    source = '''
@rule
def ranks_divide():
    """The ranks of a node divide."""

def fingerprint():
    """The fingerprint of the live weights."""

def checked():
    """Return the fingerprint of the live weights."""

class Rank(Protocol):
    """Of one run."""

    @property
    def tokens(self):
        """The tokens on this rank."""

    def forward(self):
        """See `Engine.forward`."""
        ...

    def _held(self):
        """Of this rank."""
'''
    assert [name for _, name in faults(source)] == ["fingerprint", "Rank", "forward"]
