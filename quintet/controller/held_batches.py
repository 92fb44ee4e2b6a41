"""Batches as the ranks hold them: this rank's samples of each mini-batch, and what is known of their tokens by now."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from quintet.algorithms.advantages import Advantages, Scored
from quintet.algorithms.aggregation import token_weights
from quintet.cluster.progress import Progress
from quintet.controller.messages import Assignment, PartedRoutes, RouteUse, TrainedTokens
from quintet.controller.objective import Objective, ValueObjective
from quintet.controller.sample_store import trained_samples
from quintet.data.batch import Batch, concat, make_batch, offsets, sample_ids, set_tokens, tokens
from quintet.data.routes import check_seals
from quintet.engine.routes import BatchRoutes, RecordedRoutes, ReplayedRoutes, Routes
from quintet.packing.plan import RankCell, rank_cells

SampleFields = dict[int, dict[str, Tensor]]
"""Of samples, by their number in the batch: the values of their tokens, by field."""


@dataclass
class HeldMiniBatch:
    """This rank's samples of a mini-batch. cells: those it works on; assignment: of its dp rank."""

    batch: Batch
    assignment: Assignment
    cells: list[RankCell]
    recorded: RecordedRoutes | None = None
    """What the tokens of these cells chose in the pass that recorded it."""
    parted: PartedRoutes = field(default_factory=dict)
    """Of the last update."""

    def routes(self, use: RouteUse | None) -> Routes | None:
        """Return what a pass over the cells is told of routes, or keeps them in."""
        if use == "record":
            self.recorded = RecordedRoutes()
            return self.recorded
        if use == "recorded":
            assert self.recorded is not None, "no pass over this batch has recorded its routes"
            return ReplayedRoutes(self.recorded)
        if use == "rollout":
            told = cast(Tensor, self.batch["routes"]) if self.batch.batch_size[0] else None
            return BatchRoutes(told)
        return None

    def counted(self) -> set[int]:
        """Return the positions of the samples that this rank tells of: those of the cells it is the first rank of."""
        return {i for cell in self.cells if cell.first for i in cell.samples}

    def counted_tokens(self) -> Tensor:
        """Return whether each token [tokens] is of such a sample."""
        return torch.isin(sample_ids(self.batch), torch.tensor(sorted(self.counted()), dtype=torch.int64))

    def replayed(self) -> dict[int, int]:
        """Return the samples to be told once they are trained on, and told by this rank: number and position."""
        here = self.counted()
        return {number: at for number, at in self.assignment.replayed.items() if at in here}


@dataclass
class HeldBatch:
    """A batch on this rank. scored: rewards of the whole batch; None where there are none."""

    minis: list[HeldMiniBatch]
    scored: Scored | None

    def __iter__(self) -> Iterator[HeldMiniBatch]:
        return iter(self.minis)

    def advantages(self, way: Advantages, total: Callable[[Tensor], Tensor]) -> None:
        """Set what the way makes of rewards and scores. total: sums over the ranks with other samples."""
        assert self.scored is not None, "a batch of a dataset's responses has no rewards"
        names = [name for name in way.reads if all(name in one.batch for one in self)]
        sizes = [one.batch.batch_size[0] for one in self]
        firsts = [sum(sizes[:k]) for k in range(len(sizes))]
        fields = {
            name: torch.cat([tokens(one.batch, name) for one in self]) for name in ("loss_mask", *names)
        }
        ids = torch.cat([sample_ids(one.batch) + first for one, first in zip(self, firsts, strict=True)])
        numbers = torch.tensor([n for one in self for n in one.assignment.numbers], dtype=torch.int64)
        made = way.make(fields, ids, numbers, self.scored, total)
        for name, values in made.items():
            per_token = len(values) == len(ids) and name in way.per_token
            spans = [len(sample_ids(one.batch)) for one in self] if per_token else sizes
            for one, values_here in zip(self, values.split(spans), strict=True):
                if per_token:
                    set_tokens(one.batch, name, values_here)
                else:
                    one.batch[name] = values_here

    def told(self, fields: Sequence[str]) -> SampleFields:
        """Return these fields of the samples that this rank tells of."""
        found: SampleFields = {}
        for one in self:
            ends = offsets(one.batch).tolist()
            flat = {name: tokens(one.batch, name) for name in fields}
            for at in one.counted():
                span = slice(ends[at], ends[at + 1])
                found[one.assignment.numbers[at]] = {name: values[span] for name, values in flat.items()}
        return found

    def take(self, parts: Sequence[SampleFields], fields: Sequence[str]) -> None:
        """Set these fields to what ranks of another layout tell. Raises a ValueError for a sample that none tells of."""
        found: SampleFields = {number: values for part in parts for number, values in part.items()}
        for one in self:
            missing = [number for number in one.assignment.numbers if number not in found]
            if missing:
                raise ValueError(f"no rank told {', '.join(fields)} of the samples {missing[:8]}")
            for name in fields:
                rows = [found[number][name] for number in one.assignment.numbers]
                set_tokens(one.batch, name, torch.cat(rows) if rows else torch.empty(0))

    def replayed(self) -> dict[int, TrainedTokens]:
        """Return the samples whose number is asked for, with the old log-probs as scored."""
        told: dict[int, TrainedTokens] = {}
        for one in self:
            on = tokens(one.batch, "loss_mask") > 0
            seen = (sample_ids(one.batch)[on], tokens(one.batch, "old_logprobs")[on])
            told |= trained_samples(one.batch, one.replayed(), [seen])
        return told


class WatchedObjective:
    """The objective of a mini-batch, which is called once a micro-batch: posts how many are done, and keeps what is to be told of
    the samples whose number is asked for."""

    def __init__(
        self, objective: Objective | ValueObjective, mini: HeldMiniBatch, progress: Progress
    ) -> None:
        self._objective, self._mini, self._progress = objective, mini, progress
        self._wanted = mini.replayed() if isinstance(objective, Objective) else {}
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._done = itertools.count()
        progress.begin()

    def __call__(self, outputs: Any, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self._progress(next(self._done))
        share = self._objective(outputs, fields)
        if self._wanted:
            self._seen.append((fields["sample"], fields["old_logprobs"]))
        return share

    def replayed(self) -> dict[int, TrainedTokens]:
        """Return those samples as they were trained on."""
        return trained_samples(self._mini.batch, self._wanted, self._seen)


class HeldBatches:
    """All that are alive on this rank, by name and placement: see `quintet.controller.batch_ref`."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], HeldBatch] = {}

    def put(
        self,
        key: tuple[str, str],
        parts: Sequence[tuple[Sequence[Batch], Assignment]],
        place: int,
        scored: Scored | None,
        aggregation: str | int,
    ) -> None:
        """Take a dp rank's part of each mini-batch: batches to be joined, and what to do with them. place: of this rank among
        those of its dp rank."""
        minis = []
        for pieces, assignment in parts:
            batch = concat(pieces) if pieces else _nothing()
            if "routes" in batch:
                check_seals(batch, cast(Tensor, batch["route_seals"]), assignment.numbers)
                batch = batch.exclude("route_seals")
            trained = tokens(batch, "loss_mask")
            counts = assignment.targets[0], assignment.samples
            set_tokens(batch, "weights", token_weights(trained, sample_ids(batch), aggregation, *counts))
            minis.append(HeldMiniBatch(batch, assignment, rank_cells(assignment.rounds, place)))
        self._held[key] = HeldBatch(minis, scored)

    def __getitem__(self, key: tuple[str, str]) -> HeldBatch:
        if key not in self._held:
            raise KeyError(f"the ranks of {key[1]} hold no batch {key[0]}: nothing refers to it any more")
        return self._held[key]

    def forget(self, names: Sequence[str]) -> None:
        """Drop these batches."""
        self._held = {key: held for key, held in self._held.items() if key[0] not in names}


def _nothing() -> Batch:
    """The part of a dp rank that has no sample in a mini-batch."""
    empty = make_batch([], torch.empty(0, dtype=torch.int64))
    set_tokens(empty, "rollout_logprobs", torch.empty(0))
    return empty
