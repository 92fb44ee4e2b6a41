"""What an optimizer's patterns of Hugging Face names say of each weight: `frozen` of what is not trained, `lr_multipliers` of factors on
the learning rate."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
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


def first_match(name: str, multipliers: Mapping[str, float]) -> str | None:
    """Return the pattern that counts for a Hugging Face name, None where none matches. `*` matches dots too."""
    return next((pattern for pattern in multipliers if fnmatchcase(name, pattern)), None)


def lr_factor(names: Sequence[str], multipliers: Mapping[str, float], key: str = "optimizer") -> float:
    """Return the factor of one tensor of the engine; `names` are the Hugging Face tensors it is made of, `key`
    the optimizer's in the recipe.

    Raises UserError when they have different factors: q, k and v are one tensor to the optimizer, so are gate and
    up, and so may be all experts of a layer.
    """
    factors: dict[float, str] = {}
    for name in names:
        pattern = first_match(name, multipliers)
        factors.setdefault(1.0 if pattern is None else multipliers[pattern], name)
    if len(factors) > 1:
        each = ", ".join(f"{name} has factor {factor:g}" for factor, name in factors.items())
        raise UserError(
            f"{key}.lr_multipliers: {each}, but the optimizer holds them as one tensor; let one pattern match both"
        )
    return next(iter(factors), 1.0)


def check_lr_multipliers(
    tensors: Iterable[Sequence[str]], multipliers: Mapping[str, float], key: str = "optimizer"
) -> None:
    """Raise UserError for a pattern that counts for no weight, or that parts what is one tensor.

    tensors: the Hugging Face names of each trained tensor of the engine, of the whole model.
    """
    counted = set()
    for names in tensors:
        lr_factor(names, multipliers, key)
        counted |= {first_match(name, multipliers) for name in names}
    for pattern in multipliers:
        if pattern not in counted:
            raise UserError(
                f"{key}.lr_multipliers: no weight is left for {pattern!r}. Patterns are compared with whole Hugging "
                'Face names, such as "model.layers.0.mlp.gate.weight", and the first one that matches counts'
            )
