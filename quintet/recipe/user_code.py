"""What a recipe names of the user's own: `module:name`, or `path/file.py:name`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from quintet.errors import UserError
from quintet.recipe.time_limit import no_time_limit

_PACKAGE = str(Path(__file__).resolve().parents[1])


def load_named(key: str, spec: str, kind: str, fits: Callable[[Any], bool]) -> tuple[Any, str]:
    """Return what `spec` names, and the spec by which other processes find it too: a file by its absolute path.

    Args:
        key: the recipe's key, for messages.
        kind: what it is to be, for messages: "function", "class".
        fits: whether something is of that kind.

    Raises:
        UserError: there is no such module, file or name, it is of another kind, or importing it failed.
    """
    place, _, name = spec.rpartition(":")
    with no_time_limit():
        if place.endswith(".py"):
            path = Path(place).expanduser().resolve()
            module = _load_file(key, path)
            spec = f"{path}:{name}"
        else:
            module = _load_module(key, place, kind)
    if not hasattr(module, name):
        defined = [n for n, v in vars(module).items() if fits(v) and not n.startswith("_")]
        raise UserError(f"{key}: {place} has no {kind} {name!r}; it has {', '.join(defined) or 'none'}")
    found = getattr(module, name)
    if not fits(found):
        raise UserError(f"{key}: {name!r} in {place} is {type(found).__name__}, not a {kind}")
    return found, spec


def _load_file(key: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{key}: there is no file {path}")
    try:
        return _execute(path, path.stat().st_mtime_ns)
    except UserError as error:
        raise UserError(f"{key}: {path}: {error}") from None
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        raise _import_error(key, str(path), error) from error


@functools.cache
def _execute(path: Path, changed_ns: int) -> ModuleType:
    """Once a process: what the file sets up must last."""
    # Of its own for each file, though two may be called the same, and the same in all processes.
    name = f"quintet_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError("it cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a module up by its name while it is still being imported.
    sys.modules[name] = module
    # The file may import its neighbours, as it could when run as a script.
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def _load_module(key: str, name: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UserError(f"{key}: there is no module {name!r}; {_instead(name, kind)}") from None
        raise _import_error(key, name, error) from error
    except UserError as error:
        raise UserError(f"{key}: {name}: {error}") from None
    except (Exception, SystemExit) as error:
        raise _import_error(key, name, error) from error


def _instead(name: str, kind: str) -> str:
    file = f"{name.replace('.', '/')}.py"
    if not Path(file).is_file():
        return f"for a file write path/file.py:{kind}"
    return (
        f"it is here as {file}, and modules are not looked for in the working directory: write {file}:{kind}, or put the "
        "directory into PYTHONPATH"
    )


def _import_error(key: str, name: str, error: BaseException) -> UserError:
    return UserError(
        f"{key}: importing {name} failed with {type(error).__name__}: {error}\n{traceback_of(error)}"
    )


def traceback_of(error: BaseException) -> str:
    """Return an error's traceback from the first frame of the user's own code on: what called it is no news to its author."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename.startswith((_PACKAGE, "<frozen importlib")):
        place = place.tb_next
    return "".join(traceback.format_exception(type(error), error, place)).rstrip()
