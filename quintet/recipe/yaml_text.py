"""Recipe files as text: YAML in, with the line of every key; YAML out, that reads back the same.

PyYAML follows YAML 1.1, where `1e-6` is text, `off` is false and `12:30` is 750. A recipe is read by the core
rules of YAML 1.2 instead, plus `_` within whole numbers (`8_192`), and written by the same rules. A key given
twice is an error: PyYAML would keep the last one without a word.
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


def _install_core_rules(cls: Any) -> None:
    """Replace the YAML 1.1 scalar rules of a loader or dumper class. Order matters: int before float."""
    cls.yaml_implicit_resolvers = {}
    for tag, pattern, first in _SCALARS:
        cls.add_implicit_resolver(tag, pattern, ["" if char == "\0" else char for char in first])


class _Loader(yaml.SafeLoader):
    pass


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

    Raises UserError for a syntax error, a key given twice, a key that is not text, and tags or merge keys.
    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise UserError(f"{name}: not a text file: {error.reason}") from None
    try:
        node = loader.get_single_node()
        document = Document(None)
        if node is not None:
            document.data = _construct(node, (), document.lines, name, ())
        return document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise UserError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not valid YAML: {error}") from None
    finally:
        loader.dispose()


def write_yaml(data: Any) -> str:
    """Plain data as YAML that `read_yaml` reads back to equal data; the order of keys is kept."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False
    )


def _construct(node: yaml.Node, path: Path, lines: dict[Path, int], name: str, above: tuple[int, ...]) -> Any:
    if id(node) in above:
        raise UserError(f"{name}:{node.start_mark.line + 1}: an alias that contains itself")
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        result = {}
        for key, key_node, value_node in _items(node, path, name):
            lines.setdefault((*path, key), key_node.start_mark.line + 1)
            result[key] = _construct(value_node, (*path, key), lines, name, above)
        return result
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            lines.setdefault((*path, str(index)), item.start_mark.line + 1)
            items.append(_construct(item, (*path, str(index)), lines, name, above))
        return items
    return _scalar(node, name)


def _items(node: yaml.MappingNode, path: Path, name: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    first_line: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or not isinstance(key := _scalar(key_node, name), str):
            raise UserError(f"{name}:{line}: keys are text; put this one in quotes")
        if key in first_line:
            full = ".".join((*path, key))
            raise UserError(
                f"{name}:{line}: key {full} is given twice; the first is on line {first_line[key]}"
            )
        first_line[key] = line
        yield key, key_node, value_node


def _scalar(node: yaml.Node, name: str) -> Any:
    value: str = node.value
    match node.tag:
        case "tag:yaml.org,2002:str":
            return value
        case tag if tag == _NULL:
            return None
        case tag if tag == _BOOL:
            return value.lower() == "true"
        case tag if tag == _INT:
            digits = value.replace("_", "")
            return int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)
        case tag if tag == _FLOAT:
            return float(value.lower().replace(".inf", "inf").replace(".nan", "nan"))
    raise UserError(f"{name}:{node.start_mark.line + 1}: the YAML tag {node.tag} has no meaning in a recipe")
