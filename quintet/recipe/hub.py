"""Models of the Hugging Face hub, as a recipe names them: owner/name, and their files in the hub's cache on this machine."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from quintet import models
from quintet.errors import UserError
from quintet.recipe.time_limit import no_time_limit

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.py")
"""What config, weights, tokenizer, chat template and their code are in."""
_OTHERS = ("*/*", "consolidated*")
"""The same model in other formats."""


def is_hub_id(path: Path) -> bool:
    """Return whether a model's path is an id of the hub: owner/name, and neither it nor a directory `owner` is here."""
    return bool(re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", str(path), re.ASCII)) and not (
        path.exists() or path.parent.exists()
    )


SHAPES = Path(models.__file__).parent / "shapes"
"""A directory each with the config.json of a model, for what is planned without its files."""

_ALONE: ContextVar[bool] = ContextVar("shapes_alone", default=False)


@contextlib.contextmanager
def shapes_alone() -> Iterator[None]:
    """Meanwhile a model need be no more than a config.json: in its directory, or one that came with quintet, by its name."""
    before = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(before)


def are_shapes_alone() -> bool:
    """Return whether `shapes_alone` holds."""
    return _ALONE.get()


def shape_alone(path: Path) -> Path | None:
    """Return the directory with a model's config.json while `shapes_alone`, None otherwise: nothing is downloaded.

    Raises UserError where there is none.
    """
    if not _ALONE.get() or (path / "config.json").is_file():
        return path if _ALONE.get() else None
    if (SHAPES / path.name / "config.json").is_file():
        return SHAPES / path.name
    raise UserError(
        f"model.path: {path} has no config.json (looked in {Path.cwd()}), and no shape of this name came with quintet ({known_shapes()}); name "
        "a directory with a config.json"
    )


def known_shapes() -> str:
    """Return the names of the shapes that came with quintet, with commas."""
    return ", ".join(sorted(one.name for one in SHAPES.iterdir() if one.is_dir()))


def keep_path(given: Any) -> Any:
    """Return what a recipe gives as a model's path, "./owner/name" as the absolute path that is meant: a Path drops the dot."""
    dotted = isinstance(given, str) and given.startswith("./")
    return str(Path(given).absolute()) if dotted and is_hub_id(Path(given)) else given


@functools.cache
def snapshot(name: str, revision: str | None) -> Path:
    """Return the directory of a model's files in the hub's cache, named by its commit; what is not there is downloaded.

    Without a network, what the cache holds of the revision counts. Raises UserError that says what is missing and where.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    what = f"{name} is no directory here (looked in {Path.cwd()}), and as a model of the hub (revision {revision or 'main'}) it "
    try:
        with no_time_limit():
            return Path(
                huggingface_hub.snapshot_download(
                    name, revision=revision, allow_patterns=list(_FILES), ignore_patterns=list(_OTHERS)
                )
            )
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{what}has no such revision; set model.revision to a branch, tag or commit of it"
        ) from None
    except (errors.RepositoryNotFoundError, errors.GatedRepoError):
        raise UserError(
            f"{what}was not found: check the id on {constants.ENDPOINT}/{name}. A private or gated model needs your token: "
            "hf auth login, or HF_TOKEN"
        ) from None
    except (OSError, errors.HfHubHTTPError, ValueError) as error:
        # Offline and not whole in the cache among them.
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{what}could not be read from {constants.ENDPOINT} and is not whole in the cache {constants.HF_HUB_CACHE} (of HF_HOME): "
            f"{why.rstrip('.')}. Run `hf download {name}` where there is a network, and copy the cache here or set HF_HOME to it; or name a "
            "directory"
        ) from None
