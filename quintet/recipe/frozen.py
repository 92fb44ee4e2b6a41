"""What `optimizer.frozen` says of each weight: patterns of Hugging Face names that are not trained."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from quintet.errors import UserError


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches a Hugging Face name. `*` matches dots too."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_frozen(tensors: Iterable[Sequence[str]], patterns: Sequence[str], key: str = "optimizer") -> None:
    """Raise UserError for a pattern that matches no weight, or patterns that part what is one tensor, or leave none.

    tensors: the Hugging Face names of each trained tensor of the engine, of the whole model.
    """
    known: dict[str, bool] = {}
    for names in tensors:
        frozen = [name for name in names if is_frozen(name, patterns)]
        left = [name for name in names if name not in frozen]
        if frozen and left:
            raise UserError(
                f"{key}.frozen: {frozen[0]} is frozen and {' and '.join(left[:2])} {'are' if left[1:] else 'is'} not, but the optimizer "
                "holds them as one tensor; let the patterns match all of it, or nothing"
            )
        known |= dict.fromkeys(names, bool(frozen))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern.replace("*", ""), known, 3, 0.3)
            raise UserError(
                f"{key}.frozen: no weight in training matches {pattern!r}. Patterns are compared with whole Hugging Face names, such as "
                f"{', '.join(near) or next(iter(known), 'none')}"
            )
    if known and all(known.values()):
        raise UserError(f"{key}.frozen: [{', '.join(patterns)}] leaves no weight to be trained; freeze fewer")
