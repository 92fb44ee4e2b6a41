"""Count the package's lines of code by room: what is left without blank lines, comments and docstrings.

    python tools/code_lines.py            # a table of the rooms
    python tools/code_lines.py --files    # and of their files

A docstring is any string that stands alone as a statement, so those under attributes and fields are none of the code
either. A string that is a value counts with every line it takes. The keys of a recipe are counted as well, for which the
package must be installed. `tests/test_size.py` holds the limits.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

PACKAGE = Path(__file__).resolve().parent.parent / "quintet"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return how many lines of a Python source hold code."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


@cache
def by_file(package: Path = PACKAGE) -> dict[Path, int]:
    """Return the lines of code of each file of the package, by its path within it."""
    return {
        file.relative_to(package): code_lines(file.read_text(encoding="utf-8"))
        for file in sorted(package.rglob("*.py"))
    }


def by_room(files: dict[Path, int]) -> Counter[str]:
    """Return the lines of code of each room; a file that stands in none is a room by itself."""
    rooms: Counter[str] = Counter()
    for file, count in files.items():
        rooms[file.parts[0]] += count
    return rooms


def recipe_keys() -> list[str]:
    """Return the keys of a recipe as Class.key. A section is none itself, and what it holds counts once, however many places
    of a recipe have a section of its class or of one derived from it."""
    from pydantic import BaseModel

    from quintet.recipe.schema import Recipe

    found: dict[str, None] = {}

    def look(section: type[BaseModel]) -> None:
        for name, field in section.model_fields.items():
            inner = [one for one in _types(field.annotation) if issubclass(one, BaseModel)]
            owner = next(one for one in reversed(section.__mro__) if name in inspect.get_annotations(one))
            if not inner:
                found[f"{owner.__name__}.{name}"] = None
            for one in inner:
                look(one)

    look(Recipe)
    return list(found)


def _types(annotation: Any) -> Iterator[type]:
    """The classes that a type hint names, wherever in it."""
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for part in get_args(annotation):
        yield from _types(part)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="also of each file")
    arguments = parser.parse_args()
    files = by_file()
    rooms = by_room(files)
    for room, count in sorted(rooms.items(), key=lambda one: -one[1]):
        print(f"{count:7,}  {room}")
        if arguments.files:
            inside = [(count, file) for file, count in files.items() if file.parts[0] == room]
            print("\n".join(f"{count:15,}  {file}" for count, file in sorted(inside, reverse=True)))
    print(f"{sum(rooms.values()):7,}  in all; {len(recipe_keys())} keys of a recipe")


if __name__ == "__main__":
    main()
