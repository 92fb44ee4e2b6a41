"""From a recipe file and `key=value` overrides to a checked `Recipe`, or to one error that says all that is wrong.

The order: YAML text to plain data with the line of each key, overrides laid on top, types by pydantic, then
the rules across fields. Every problem names its key, its value and where that was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from quintet.errors import UserError
from quintet.install import shipped_recipe
from quintet.recipe.elsewhere import VALUES, is_elsewhere
from quintet.recipe.hub import SHAPES, are_shapes_alone, known_shapes
from quintet.recipe.keys import RENAMED, all_keys, expected, has_kinds, leaf_keys, nearest_key, section_type
from quintet.recipe.megatron import instead
from quintet.recipe.problem import Problem
from quintet.recipe.rules import Command, broken_rules
from quintet.recipe.schema import Recipe
from quintet.recipe.yaml_text import MOST_CHARACTERS, read_yaml, write_yaml
from quintet.recipe.yaml_text import Path as KeyPath

_MOST_TOLD = 20
_OVERRIDE = "override "
_MOST_SECTIONS = 16


@dataclass
class _Source:
    """Plain data, and for each key where it was written: "recipe.yaml:12" or 'override "a.b=c"'."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str | None:
        """Where `path`, or the nearest section above it, was written; None for a default."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return None

    def written_at_or_below(self, path: KeyPath) -> list[str]:
        """Where `path` itself or keys below it were written, `path` itself first."""
        return [self.origins[key] for key in sorted(self.origins) if key[: len(path)] == path]


def load_recipe(
    path: str | Path | None, overrides: Iterable[str] = (), *, command: Command = "train"
) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: YAML file; a model's directory, or the config.json in it, stands for a recipe of `model.path` alone; None begins with nothing but defaults.
        overrides: "dotted.key=value" each, in order; the value is YAML (`true`, `null`, `[a, b]`, `1e-6`).
        command: what the recipe is for; some keys are needed by some commands only.

    Raises:
        UserError: lists every problem found, each with its file and line or its override.
    """
    source = _Source("the recipe") if path is None else _read(_found(Path(path)))
    for override in overrides:
        _apply(source, override)
    _fill_empty_sections(source.data)
    try:
        # JSON mode is strict about types ("3" is no number) yet takes text for a path and 1 for 1.0.
        recipe = Recipe.model_validate_json(json.dumps(source.data), strict=True)
    except ValidationError as error:
        found = [_of_its_key(details, source) for details in error.errors(include_url=False)]
        wrong: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
        for details in found:
            for one in _whole(details, source):
                wrong.setdefault(one["loc"], []).append(one)
        # The nearest key of an unknown one takes milliseconds, and of thousands only those that are told are looked for.
        told = [_explain(one, source) for ones in list(wrong.values())[:_MOST_TOLD] for one in ones]
        told = list(dict.fromkeys(told))
        raise UserError(_report(source, told[:_MOST_TOLD], max(len(wrong), len(told)))) from None
    broken = broken_rules(recipe, command)
    if broken:
        told = [_locate(problem, source) for problem in broken[:_MOST_TOLD]]
        raise UserError(_report(source, told, len(broken)))
    recipe.model.pin()
    return recipe


def dump_resolved(recipe: Recipe) -> str:
    """Return the recipe as YAML with every key written out; `load_recipe` reads it back to an equal recipe."""
    return write_yaml(recipe.model_dump(mode="json"))


def _found(path: Path) -> Path:
    """The file, or outside of the checkout the one of that name that came with quintet."""
    return path if path.exists() else shipped_recipe(path) or path


def _of_model(path: Path) -> _Source:
    """A recipe of nothing but a model's directory, or of a shape's name."""
    return _Source("the recipe", {"model": {"path": str(path)}}, {("model", "path"): str(path)})


def _read(path: Path) -> _Source:
    if path.name == "config.json" and path.is_file():
        return _of_model(path.parent)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)  # of a longer one as much as tells that it is too long
    except FileNotFoundError:
        if are_shapes_alone() and (SHAPES / path / "config.json").is_file():
            return _of_model(path)
        shipped = Path("recipes", f"{path.stem}.yaml")
        hint = f"; {shipped} came with quintet" if shipped_recipe(shipped) else ""
        if "=" in str(path):
            hint = "; overrides come after a recipe"
        elif are_shapes_alone() and not hint and path.suffix not in (".yaml", ".yml", ".json"):
            hint = f"; shapes that came with quintet are {known_shapes()}"
        raise UserError(f"recipe {path} does not exist (looked in {Path.cwd()}){hint}") from None
    except IsADirectoryError:
        if (path / "config.json").is_file():
            return _of_model(path)
        files = [path / "checkpoint", path / "recipe.yaml"]
        found = " or ".join(str(file) for file in files if file.exists()) or "a YAML file"
        raise UserError(f"recipe {path} is a directory without a model; name {found}") from None
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"recipe {path} is not UTF-8 text; name a YAML file") from None
    document = read_yaml(text, str(path))
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        raise UserError(f"{path}: expected sections with keys, such as\n  model:\n    path: …")
    origins = {key: f"{path}:{line}" for key, line in document.lines.items()}
    return _Source(str(path), document.data, origins)


def _apply(source: _Source, override: str) -> None:
    key, equals, text = override.partition("=")
    where = f'{_OVERRIDE}"{_cut(override)}"'
    path = tuple(key.strip().split("."))
    if not equals or not all(path) or len(path) > _MOST_SECTIONS:
        raise UserError(
            f"{where}: expected key=value with a dotted key and no blanks around =, such as train.steps=10"
        )
    try:
        value = text if _is_plain(".".join(path), text) else read_yaml(text, where).data
    except UserError as error:
        raise UserError(str(error).replace(f"{where}:1: ", f"{where}: ")) from None
    node = source.data
    for length, part in enumerate(path[:-1], start=1):
        below = node.get(part)
        if below is None:
            source.origins.pop(path[:length], None)  # a null, which a section takes the place of
            below = node[part] = {}
        if not isinstance(below, dict):
            break  # The type error of this value is reported below, with both places.
        node = below
    else:
        node[path[-1]] = value
        for old in [one for one in source.origins if one[: len(path)] == path]:
            del source.origins[old]
        source.origins[path] = where
        return
    raise UserError(f"{where}: {'.'.join(path[:-1])} is no section (at {source.origin(path[:-1])})")


def _is_plain(key: str, text: str) -> bool:
    """Whether a text stands there as it is, which YAML would take for a mapping or nothing at all: a template, or where null is none, ""."""
    of_key = getattr(leaf_keys().get(key), "annotation", None)
    template = ("{{" in text or "{%" in text) and text.lstrip()[0] not in "'\"|>"
    return template and str in (of_key, *get_args(of_key)) if text else of_key is str


def _fill_empty_sections(data: dict[str, Any]) -> None:
    """`train:` with nothing below it means its defaults; for an optional section, null means absent."""
    for name, field_info in Recipe.model_fields.items():
        if name in data and data[name] is None and field_info.annotation is section_type(field_info):
            data[name] = {}


def _of_its_key(details: ErrorDetails, source: _Source) -> ErrorDetails:
    """A value that is of none of its key's kinds, which pydantic tells kind by kind, is told as a value of that key."""
    value: Any = source.data
    path = tuple(str(part) for part in details["loc"])
    for length, part in enumerate(path, start=1):
        field_info, value = leaf_keys().get(".".join(path[:length])), value.get(part)
        if field_info is not None:
            return {**details, "loc": path[:length], "input": value} if has_kinds(field_info) else details
        if not isinstance(value, dict):
            break
    return details


def _whole(details: ErrorDetails, source: _Source) -> list[ErrorDetails]:
    """An unknown section is told by the keys that were written in it where these say more: on the command line, or in another
    trainer's words."""
    path = tuple(str(part) for part in details["loc"])
    if details["type"] != "extra_forbidden" or ".".join(path) in RENAMED:
        return [details]
    leaves = list(_leaves(path, details["input"]))
    if any(
        (source.origin(one) or "").startswith(_OVERRIDE) or is_elsewhere(".".join(one)) or instead(one[-1])
        for one, _ in leaves
    ):
        return [{**details, "loc": leaf, "input": value} for leaf, value in leaves]
    return [details]


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves((*path, name), below)
    else:
        yield path, value


def _explain(details: ErrorDetails, source: _Source) -> str:
    path = tuple(str(part) for part in details["loc"])
    key = _cut(".".join(path))
    where = next(iter(source.written_at_or_below(path)), source.origin(path)) or source.name
    if details["type"] == "extra_forbidden" and (now := RENAMED.get(key)) is not None:
        return f"{where}: {key} is called {now} now"
    if details["type"] == "extra_forbidden":
        ours = nearest_key(key)
        if ours is not None and is_elsewhere(key):
            meant = VALUES.get(ours, {}).get(str(details["input"]))
            return f"{where}: unknown key {key}; in quintet it is {ours}{f'={meant}' if meant else ''}"
        if done := instead(path[-1]):
            return f"{where}: unknown key {key}; {done}"
        if ":" in path[-1]:
            return f"{where}: unknown key {key}; a colon needs a space after it: {path[-1].replace(':', ': ', 1)}"
        near = "none in docs/recipe.md is like it" if ours is None else f"the nearest valid key is {ours}"
        return f"{where}: unknown key {key}; {near}{_siblings(path)}"
    if details["type"] in ("value_error", "too_long", "string_too_long"):
        return f"{where}: {key} is {_shown(details['input'])}; {details['msg'].removeprefix('Value error, ')}"
    known = all_keys()
    above = (".".join(path[:length]) for length in range(len(path), 0, -1))
    field_key = next((key for key in above if key in known), None)
    by_override = field_key if field_key and where.startswith(_OVERRIDE) else ""
    wanted = f"expected {expected(known[field_key], by_override)}" if field_key else details["msg"]
    meant = VALUES.get(key, {}).get(str(details["input"]))
    here = f" ({details['input']} is {meant} here)" if meant else ""
    return f"{where}: {key} is {_shown(details['input'])}; {wanted}{here}"


def _siblings(path: KeyPath) -> str:
    """The keys of the section an unknown key stands in, when it stands in one."""
    above = ".".join(path[:-1])
    field_info = all_keys().get(above)
    section = section_type(field_info) if field_info is not None else None if above else Recipe
    if section is None:
        return ""
    return f" (keys {'of ' + above if above else 'at the top'}: {', '.join(section.model_fields)})"


def _locate(problem: Problem, source: _Source) -> str:
    """A broken rule with where its keys were written; of keys left at their defaults, where their section is."""
    paths = [tuple(key.split(".")) for key in problem.keys]
    places = [place for path in paths for place in source.written_at_or_below(path)[:1]]
    places = places or [place for place in map(source.origin, paths) if place is not None]
    return f"{', '.join(dict.fromkeys(places)) or source.name}: {problem.message}"


def _report(source: _Source, problems: list[str], count: int) -> str:
    """problems: those that are told, of `count`."""
    if count == 1:
        return problems[0]
    more = [f"and {count - len(problems)} more"] if count > len(problems) else []
    return f"{source.name} has {count} problems:\n" + "\n".join(f"  {one}" for one in (*problems, *more))


def _shown(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False, default=str), 60)


def _cut(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 3] + "…"
