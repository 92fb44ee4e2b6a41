"""Paths as a recipe may write them: anything, also what no file can be called. Path's own methods raise for such names."""

from __future__ import annotations

import os.path
import re

HUB_NAME = re.compile(r"(?!.*\.(?:jsonl?|parquet|csv|txt)$)[\w-][\w.-]*/[\w.-]+(?::[\w.-]+){0,2}")
"""Of a data set of the hub: owner/name, with a split, or a configuration and a split, after it."""


def expanded(path: str) -> str:
    """Return `path` with "~" for the home directory. Raises ValueError for one that no file system takes."""
    path = os.path.expanduser(path)  # noqa: PTH111
    if "\0" in path or any(len(os.fsencode(part)) > 255 for part in path.split("/")) or len(path) > 4000:
        raise ValueError("no file system takes such a path")
    return path


def is_file(path: str) -> bool:
    """Return whether there is such a file, "~" being the home directory."""
    return os.path.isfile(os.path.expanduser(path))  # noqa: PTH111, PTH113
