"""Recipe files as text: YAML in, with the line of every key; YAML out, that reads back the same.

PyYAML follows YAML 1.1, where `1e-6` is text, `off` is false and `12:30` is 750. A recipe is read by the core
rules of YAML 1.2 instead, plus `_` within whole numbers (`8_192`), and written by the same rules. A key given
twice is an error: PyYAML would keep the last one without a word.

Reading ends within a second, whatever the text: its size, its depth, and what its aliases repeat have limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from quintet.errors import UserError

Path = tuple[str, ...]
"""Where a key stands in the recipe: ("model", "build", "layers")."""

_NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))
_SCALARS: list[tuple[str, re.Pattern[str], str]] = [
    (_NULL, re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN\0"),
    (_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    (_INT, re.compile(r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$"), "-+0123456789"),
    (
        _FLOAT,
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+0123456789.",
    ),
]

_PATTERNS = {tag: pattern for tag, pattern, _ in _SCALARS}


def _install_core_rules(cls: Any) -> None:
    """Replace the YAML 1.1 scalar rules of a loader or dumper class. Order matters: int before float."""
    cls.yaml_implicit_resolvers = {}
    for tag, pattern, first in _SCALARS:
        cls.add_implicit_resolver(tag, pattern, ["" if char == "\0" else char for char in first])


MOST_CHARACTERS = 64 << 10
"""Of a text. PyYAML reads about 100 KiB a second."""

_MOST_WRITTEN_OUT = 2 * MOST_CHARACTERS
"""With a character more for each value, less than this without any alias."""
_MOST_LEVELS = 32
_MOST_ITEMS = 1000  # of one list or mapping: rules compare them with each other, and with all weights
_MOST_DIGITS = 64


_AS_JINJA = "; text with {{ or {% in it, such as Jinja, stands in quotes or indented below a |"
_AS_PATTERN = '; text that begins with * stands in quotes: ["*.mlp.gate.weight"]'


class _Loader(yaml.SafeLoader):
    """Refuses nesting on the way down, before Python's own stack ends."""

    levels = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.levels == _MOST_LEVELS:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(
                problem=f"nested more than {_MOST_LEVELS} levels deep", problem_mark=mark
            )
        self.levels += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.levels -= 1
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: _Dumper, text: str) -> yaml.Node:
    """Quoted with escapes where a character is a line break to YAML, which other styles would fold away."""
    style = '"' if any(char in text for char in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_install_core_rules(_Loader)
_install_core_rules(_Dumper)
_Dumper.add_representer(str, _write_text)


@dataclass
class Document:
    """One YAML text: its plain data, and the 1-based line where each key stands."""

    data: Any
    lines: dict[Path, int] = field(default_factory=dict)


def read_yaml(text: str, name: str) -> Document:
    """Parse YAML `text`; `name` stands for it in errors ("recipe.yaml").

    Raises UserError for a syntax error, a key given twice, a key that is not text, tags or merge keys, and a text that is
    too long, too deeply nested or repeats too much.
    """
    if len(text) > MOST_CHARACTERS:
        raise UserError(
            f"{name}: longer than {MOST_CHARACTERS:,} characters, which no recipe is; long texts can stand in files of their own"
        )
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise UserError(f"{name}: not a text file: {error.reason}") from None
    try:
        node = loader.get_single_node()
        reader = _Reader(name)
        return Document(None if node is None else reader.value(node, (), ()), reader.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        hint = _hint(error, text, mark.line) if mark else ""
        raise UserError(f"{where}: not valid YAML: {error.problem or error.context}{hint}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not valid YAML: {error}") from None
    finally:
        loader.dispose()


def _hint(error: yaml.MarkedYAMLError, text: str, line: int) -> str:
    """What to do where the line that YAML cannot read has Jinja in it, or begins a pattern with an asterisk."""
    there = "".join(text.split("\n")[line : line + 1])
    if "{{" in there or "{%" in there:
        return _AS_JINJA
    return _AS_PATTERN if "alias" in f"{error.context} {error.problem}" else ""


def write_yaml(data: Any) -> str:
    """Return the plain data as YAML that `read_yaml` reads back to equal data; the order of keys is kept."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False
    )


class _Reader:
    """From nodes to plain data. name: of the text, for errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Path, int] = {}
        self._written_out = 0

    def value(self, node: yaml.Node, path: Path, above: tuple[int, ...]) -> Any:
        """path: where the node stands. above: the collections around it."""
        if id(node) in above:
            raise self._error(node, "an alias that contains itself")
        above = (*above, id(node))
        if isinstance(node, yaml.CollectionNode):
            self._count(node, 1)
            if len(node.value) > _MOST_ITEMS:
                raise self._error(node, f"{len(node.value):,} values in one place; at most {_MOST_ITEMS:,}")
        if isinstance(node, yaml.MappingNode):
            result = {}
            for key, key_node, value_node in self._items(node, path):
                self.lines.setdefault((*path, key), key_node.start_mark.line + 1)
                result[key] = self.value(value_node, (*path, key), above)
            return result
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines.setdefault((*path, str(index)), item.start_mark.line + 1)
                items.append(self.value(item, (*path, str(index)), above))
            return items
        return self._scalar(node)

    def _items(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or not isinstance(
                key := self._scalar(key_node), str
            ):
                jinja = "" if isinstance(key_node, yaml.ScalarNode) else _AS_JINJA
                raise self._error(key_node, f"keys are text; put this one in quotes{jinja}")
            if key in first_line:
                full = ".".join((*path, key))
                raise self._error(
                    key_node, f"key {full} is given twice; the first is on line {first_line[key]}"
                )
            first_line[key] = line
            yield key, key_node, value_node

    def _scalar(self, node: yaml.Node) -> Any:
        value: str = node.value
        self._count(node, 1 + len(value))
        if node.tag == "tag:yaml.org,2002:str":
            if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
                raise self._error(node, "half of a surrogate pair is no character")
            return value
        if (pattern := _PATTERNS.get(node.tag)) is None:
            raise self._error(node, f"the YAML tag {node.tag} has no meaning in a recipe")
        if len(value) > _MOST_DIGITS:
            raise self._error(node, f"a number of {len(value)} characters; put it in quotes if it is text")
        if not pattern.match(value):
            raise self._error(node, f"{value!r} is not what its YAML tag {node.tag} says")
        match node.tag:
            case tag if tag == _NULL:
                return None
            case tag if tag == _BOOL:
                return value.lower() == "true"
            case tag if tag == _INT:
                digits = value.replace("_", "")
                return int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)
        return float(value.lower().replace(".inf", "inf").replace(".nan", "nan"))

    def _count(self, node: yaml.Node, characters: int) -> None:
        """An alias is read again each time, and aliases of aliases double: ten lines of them are gigabytes."""
        self._written_out += characters
        if self._written_out > _MOST_WRITTEN_OUT:
            raise self._error(
                node, f"with its aliases written out, longer than {_MOST_WRITTEN_OUT:,} characters"
            )

    def _error(self, node: yaml.Node, what: str) -> UserError:
        return UserError(f"{self.name}:{node.start_mark.line + 1}: {what}")
