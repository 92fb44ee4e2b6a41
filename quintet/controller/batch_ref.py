"""A step's batch as the controller knows it: a value with a name, which verbs take and return.

The ranks hold tokens, scores and advantages under that name, for as long as a `BatchRef` of it is alive; here are the plan, which
samples are in it, and which fields the ranks hold. Two batches can be alive at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quintet.controller.samples import Samples
from quintet.recipe.schema import Layout


@dataclass(frozen=True)
class Placement:
    """Ranks in a layout, which roles of that layout share. name: the first of these roles."""

    name: str
    layout: Layout
    coords: Sequence[Mapping[str, int]]
    """Of each rank on the mesh's axes."""

    @property
    def dp(self) -> int:
        return len(self.coords) // (self.layout.tp * self.layout.pp * self.layout.cp)

    @property
    def teller(self) -> int:
        """A rank with the loss: every rank has as many micro-batches, at one pace."""
        last = max(c["pp"] for c in self.coords)
        return next(rank for rank, c in enumerate(self.coords) if c["pp"] == last)


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step is taken on: the `number`-th part of a batch, of `total`.

    rounds: micro-batches of a rank, by placement.
    """

    batch: str
    number: int
    total: int
    rounds: Mapping[str, int]
    fields: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """As its batch has them."""

    def need(self, names: Iterable[str], placement: str) -> None:
        """Raise a ValueError for a field that ranks of this placement do not hold."""
        for name in names:
            if placement not in self.fields.get(name, frozenset()):
                held = ", ".join(sorted(self.fields)) or "no scores"
                raise ValueError(f"batch {self.batch} has no {name} on the ranks of {placement}, only {held}")


@dataclass(frozen=True)
class Fields:
    """Per-token or per-sample fields that ranks of a batch hold now: by name the placements that hold it."""

    batch: str
    held: Mapping[str, frozenset[str]]


class Lease:
    """What keeps a name alive on the ranks: once nothing refers to it, the name is on the list of those to be dropped."""

    def __init__(self, name: str, dropped: list[str]) -> None:
        weakref.finalize(self, dropped.append, name).atexit = False


@dataclass(frozen=True)
class BatchRef:
    """A batch that ranks hold. holders: by placement the dp rank that has each sample, samples numbered through the batch.

    samples: what was generated; None for responses of a dataset.
    """

    name: str
    minibatches: tuple[MiniBatch, ...]
    holders: Mapping[str, Sequence[int]]
    lease: Lease = field(repr=False)
    samples: Samples | None = None
    fields: Mapping[str, frozenset[str]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the policy's plan, where it was chosen by time."""

    @property
    def versions(self) -> list[int]:
        """The policy version that made each sample."""
        return [] if self.samples is None else self.samples.versions

    def __or__(self, made: Fields) -> BatchRef:
        """The same batch, with what its ranks hold besides now."""
        if made.batch != self.name:
            raise ValueError(
                f"fields {', '.join(made.held)} are of the batch {made.batch}, not of {self.name}"
            )
        both = {
            name: self.fields.get(name, frozenset()) | made.held.get(name, frozenset())
            for name in self.fields.keys() | made.held.keys()
        }
        parts = tuple(replace(one, fields=both) for one in self.minibatches)
        return replace(self, fields=both, minibatches=parts)

    def need(self, names: Iterable[str], placement: str) -> None:
        """Raise a ValueError for a field that ranks of this placement do not hold."""
        self.minibatches[0].need(names, placement)


_numbers = itertools.count(1)


def fresh_name() -> str:
    """Return a name that no batch of this process has had."""
    return f"batch-{next(_numbers)}"
