"""One number over the fp32 master weights of a rank, which changes whenever one of them does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from quintet.engine.checkpoint.slots import slots
from quintet.engine.weights.fingerprint import fingerprints
from quintet.engine.weights.hashing import GOLDEN
from quintet.models.mcore import Box

COLUMNS = 4096
"""Masters are seen as matrices of this width: a fingerprint hashes rows and columns, not elements."""


def master_fingerprint(optimizer: Any, parameters: Iterable[Tensor]) -> int | None:
    """Return a fingerprint over all masters of megatron-core's optimizer, wherever they are; None where parameters are their own
    masters.

    parameters: the model's on this rank. The number means something only beside another of the same rank and layout.
    """
    masters = [slot.master.detach() for slot in slots(optimizer, parameters) if slot.master is not None]
    if not masters:
        return None
    found = fingerprints(item for i, master in enumerate(masters) for item in _rows(i, master))
    # Masters that trade places change the number too: each counts with an odd factor of its own.
    total = sum(value * (2 * int(name) + 1) * GOLDEN for (name, _), value in found.items())
    return total % (1 << 64)


def _rows(number: int, master: Tensor) -> Iterator[tuple[str, tuple[int, ...], Box, Tensor]]:
    """A master as items of `fingerprints`: whole rows, and what is left."""
    flat = master.view(-1)
    rows, rest = divmod(len(flat), COLUMNS)
    shape = (rows + 1, COLUMNS)
    if rows:
        whole = flat[: rows * COLUMNS].view(rows, COLUMNS)
        yield str(number), shape, ((0, rows), (0, COLUMNS)), whole
    if rest:
        yield str(number), shape, ((rows, rows + 1), (0, rest)), flat[rows * COLUMNS :].view(1, rest)
