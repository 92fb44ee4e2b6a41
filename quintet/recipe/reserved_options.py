"""Options handed through to a back end: those that quintet decides itself, and those that the back end does not know."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from quintet.recipe.problem import Problem
from quintet.recipe.schema import Recipe


def decided_options(key: str, options: Iterable[str], decided: Mapping[str, str]) -> Iterator[Problem]:
    """Yield those of the options under `key` that quintet decides: the recipe key, and the sentence that refuses it.

    decided: which they are, and what decides each.
    """
    for name in options:
        if name in decided:
            yield Problem(f"{key}.{name}: {decided[name]}; remove it")


def unknown_options(
    key: str, options: Iterable[str], decided: Collection[str], known: Collection[str], fields: str
) -> Iterator[Problem]:
    """Yield those options that the back end does not know, with the nearest that it does: the recipe key, and a sentence.

    known: the names that it knows; `fields` says whose they are. What quintet decides is refused for that.
    """
    for name in options:
        if name not in known and name not in decided:
            near = difflib.get_close_matches(name, set(known) - set(decided), 1)
            told = f"did you mean {near[0]}?" if near else "remove it"
            yield Problem(f"{key}.{name}: {fields} have no such field; {told}")


DECLARED_IN = {
    "vllm": ("engine/arg_utils.py", "EngineArgs"),
    "sglang": ("srt/server_args.py", "ServerArgs"),
}
"""By back end, the file of the package of that name, and the class, whose fields are its options."""


def unknown_here(recipe: Recipe, backend: str, title: str, decided: Collection[str]) -> Iterator[Problem]:
    """Yield `unknown_options` of a recipe that generates with `backend`, by what is installed here, where ranks run here.

    title: what messages call it.
    """
    options, here = getattr(recipe.rollout, backend), recipe.cluster.address is None
    if recipe.rollout.backend != backend or not options or not here:
        return
    known = declared_fields(backend, *DECLARED_IN[backend])
    if known is not None:
        fields = f"the {DECLARED_IN[backend][1]} of the {title} that is installed here"
        yield from unknown_options(f"rollout.{backend}", options, decided, known, fields)


def declared_fields(package: str, file: str, cls: str) -> frozenset[str] | None:
    """Return the fields of a dataclass in a package that is installed here, read without importing it, which takes seconds; None
    where it is not installed, or keeps no such class there."""
    spec = importlib.util.find_spec(package)  # of a package's own name it imports nothing
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    source = next((path for folder in folders if (path := Path(folder) / file).is_file()), None)
    if source is None:
        return None
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            return frozenset(
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign)
                and isinstance(one.target, ast.Name)
                and not ast.unparse(one.annotation).startswith("ClassVar")
            )
    return None
