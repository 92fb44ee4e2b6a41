"""Options handed through to a back end that quintet decides itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


def decided_options(
    key: str, options: Iterable[str], decided: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Those of the options under `key` that quintet decides: the recipe key, and the sentence that refuses it.

    decided: which they are, and what decides each.
    """
    for name in options:
        if name in decided:
            yield (f"{key}.{name}",), f"{key}.{name}: {decided[name]}; remove it"
