"""The schema seen as dotted keys: which exist, what each expects, and which one a misspelt key meant."""

from __future__ import annotations

import difflib
import functools
import pathlib
import types
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from quintet.recipe.elsewhere import WORDS, dotted_elsewhere
from quintet.recipe.schema import Recipe, Section

RENAMED = {
    "agreement": "mismatch",
    "rollout.adapters": "rollout.adapter_sync (and its value alone is called separate)",
}
"""Keys that had another name, and the one they have now."""


def section_type(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field (also of an optional section), or None for a leaf key."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


@functools.cache
def leaf_keys() -> dict[str, FieldInfo]:
    """Return every key that takes a value, dotted, in schema order."""
    return {key: field for key, field in all_keys().items() if section_type(field) is None}


@functools.cache
def all_keys() -> dict[str, FieldInfo]:
    """Return every key, sections included, dotted, in schema order."""
    return _collect(Recipe, ())


def _collect(section: type[Section], prefix: tuple[str, ...]) -> dict[str, FieldInfo]:
    keys = {}
    for name, field in section.model_fields.items():
        keys[".".join((*prefix, name))] = field
        inner = section_type(field)
        if inner is not None:
            keys.update(_collect(inner, (*prefix, name)))
    return keys


def nearest_key(unknown: str) -> str | None:
    """Return the valid dotted key that `unknown` most probably meant, with its value where another trainer's name says that too;
    None where no key is like it.

    The last word decides most; where the key stands decides between equal words, and in a section that there is no key of another is meant
    but by a word much like it.
    """
    section, _, word = unknown.rpartition(".")

    def likeness(key: str) -> float:
        key_section, _, key_word = key.rpartition(".")
        return 0.75 * _ratio(word, key_word) + 0.25 * _ratio(section, key_section)

    if (elsewhere := dotted_elsewhere(unknown)) is not None:
        return elsewhere
    alike = [key for key in all_keys() if "." in key and key.rpartition(".")[2] == word]
    if alike:
        first = unknown.partition(".")[0]
        return max(alike, key=lambda key: (key.partition(".")[0] == first, -key.count("."), likeness(key)))
    best = max(all_keys(), key=likeness)
    if section and _ratio(word, best.rpartition(".")[2]) < 0.8:
        inside = (key for key in all_keys() if key.rpartition(".")[0] == section)
        best = max(inside, key=likeness, default=best)
    return best if likeness(best) > 0.86 else WORDS.get(word, best if likeness(best) > 0.57 else None)


def _ratio(a: str, b: str) -> float:
    return 1.0 if a == b else difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def expected(field: FieldInfo, override: str = "") -> str:
    """Return what a key accepts, in words: "a whole number greater than 0, or null". override: the key, where an override wrote it."""
    if (section := section_type(field)) is not None:
        keys = [f"{override}.{key}" if override else key for key in section.model_fields]
        shown = ", ".join(keys[:5]) + " …" * (len(keys) > 5)
        or_null = ", or null" if type(None) in get_args(field.annotation) else ""
        return f"a section (its keys{'' if override else ', indented below it'}: {shown}){or_null}"
    return _describe(field.annotation, list(field.metadata))


def has_kinds(field: FieldInfo) -> bool:
    """Return whether a key takes values of several kinds, such as a number or a word; null is none."""
    kinds = [one for one in get_args(field.annotation) if one is not type(None)]
    return get_origin(field.annotation) in (Union, types.UnionType) and len(kinds) > 1


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _describe(arguments[0], [*_flat(annotation.__metadata__), *metadata])
    if origin in (Union, types.UnionType):
        inner = [_describe(one, metadata) for one in arguments if one is not type(None)]
        return " or ".join(inner) + (", or null" if type(None) in arguments else "")
    if origin is Literal:
        return "one of " * (len(arguments) > 1) + ", ".join(str(one) for one in arguments)
    if origin is list:
        return f"a list, each item {_describe(arguments[0], [])}"
    if origin is dict:
        value = arguments[1]
        return "a mapping" if value is Any else f"a mapping, each value {_describe(value, [])}"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        pathlib.Path: "a path",
    }
    return " ".join(filter(None, [names.get(annotation, str(annotation)), _bounds(metadata)]))


def _flat(metadata: Any) -> list[Any]:
    """Constraints of `Annotated[..., Field(gt=0)]` sit one level down, in the FieldInfo."""
    return [one for item in metadata for one in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _bounds(metadata: list[Any]) -> str:
    words = []
    for item in _flat(metadata):
        match item:
            case annotated_types.Gt(gt=bound):
                words.append(f"greater than {bound}")
            case annotated_types.Ge(ge=bound):
                words.append(f"at least {bound}")
            case annotated_types.Lt(lt=bound):
                words.append(f"less than {bound}")
            case annotated_types.Le(le=bound):
                words.append(f"at most {bound:,}")
            case annotated_types.MinLen(min_length=least):
                words.append(f"of at least {least} character{'s' * (least != 1)}")
            case str():  # why the bound before it
                words[-1] += f" ({item})"
    return " and ".join(words)
