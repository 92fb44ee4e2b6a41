"""How this copy of quintet was installed: its distribution, its version, and what came along."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

DISTRIBUTION = "quintet-rl"
"""Its name on a package index; `quintet` there is another project's."""


def version() -> str | None:
    """Return the version that is installed, or None of a source tree that is not."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def with_extra(extra: str) -> str:
    """Return the command that installs quintet with one of its extras."""
    return f"pip install -e '.[{extra}]' in quintet's checkout"


def shipped_recipe(path: Path) -> Path | None:
    """Return the recipe of this name that came with quintet, where `path` is one of `recipes/`; None if there is none."""
    if path.parts[:-1] != ("recipes",):
        return None
    in_checkout = Path(__file__).resolve().parent.parent / path
    if in_checkout.is_file():
        return in_checkout
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(one.locate())) for one in files if one.parts[-2:] == path.parts), None)
