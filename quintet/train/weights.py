"""Weights from the trainer's ranks to rollouts in processes of their own, and the proof that they arrived.

Each rank that trains serves the receivers beside it (`quintet.sync.server`), straight from the ranks' shards, while the rollouts
take what comes. Then both sides tell fingerprints of what they hold, and nothing is generated before they are equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from quintet.cluster.calls import PendingCall
from quintet.cluster.dispatch import all_to_all
from quintet.cluster.group import WorkerGroup
from quintet.recipe import schema
from quintet.recipe.rollout import devices_of_copy
from quintet.rollout import Fingerprints, Wanted
from quintet.sync.proof import Told, compare, mismatch, stuck
from quintet.sync.server import ReceiverSpec
from quintet.sync.source import ChannelSource
from quintet.train.messages import EngineWeights

GIB = 1024.0**3


class Receiving(Protocol):
    """Rollouts that take weights; asking them leaves out those that die of it."""

    groups: list[WorkerGroup | None]

    def ask(self, method: str, *args: Any, phase: str) -> dict[int, list[Any]]: ...

    def gathered(
        self, calls: Mapping[int, PendingCall], beside: PendingCall | None = None
    ) -> dict[int, Any]: ...


class WeightSync:
    """Brings the trainer's weights to all rollouts. say: tells the user what is odd."""

    def __init__(
        self,
        policy: WorkerGroup,
        rollouts: Receiving,
        recipe: schema.Recipe,
        say: Callable[[str], None],
    ) -> None:
        self._policy, self._rollouts, self._recipe, self._say = policy, rollouts, recipe, say
        self._masters: list[int | None] | None = None
        self._told: Told | None = None
        self._planned: list[WorkerGroup | None] = []
        self._sources: dict[int, list[ChannelSource]] = {}

    def changed(self) -> None:
        """The trainer has taken a step, and its optimizer state is still there to be looked at."""
        if self._recipe.rollout.sync_proof:
            self._masters = self._policy.call("masters", phase="sync")

    def bring(self) -> dict[str, float]:
        """Transfer and prove, and tell what it took; rollouts that died are missing afterwards.

        Raises SyncMismatch naming the tensors that did not arrive as they were sent.
        """
        began = time.perf_counter()
        if self._planned != self._rollouts.groups:
            self._plan()
        serving = self._policy.submit("serve", phase="sync")
        taking = {
            number: group.submit("update_weights", self._sources[number], dispatch=all_to_all, phase="sync")
            for number, group in enumerate(self._rollouts.groups)
            if group is not None and number in self._sources
        }
        self._rollouts.gathered(taking, beside=serving)
        served = serving.result()
        told = {
            "sync/seconds": time.perf_counter() - began,
            "sync/gib": sum(one.bytes for one in served) / GIB,
        }
        if self._recipe.rollout.sync_proof:
            began = time.perf_counter()
            told["sync/masters_alone"] = self._prove()
            told["sync/proof_seconds"] = time.perf_counter() - began
        return told

    def _plan(self) -> None:
        """Say who serves whom, now that receivers have come or gone."""
        wanted = self._rollouts.ask("receivers", phase="sync")
        groups = list(self._rollouts.groups)
        assignments: list[list[ReceiverSpec]] = [[] for _ in range(self._policy.n_ranks)]
        places: list[tuple[int, int]] = []
        for number, ranks in wanted.items():
            first = number * devices_of_copy(self._recipe)
            for rank, of_rank in enumerate(ranks):
                for device, boxes in enumerate(of_rank):
                    here = first + (rank if len(ranks) > 1 else device)
                    spec = self._spec(number, rank, device, boxes)
                    assignments[self._server_of(here, boxes)].append(spec)
                    places.append((number, rank))
        tickets: list[list[Any]] = self._policy.call("plan_sync", assignments, phase="sync")
        by_receiver = {ticket.receiver: ticket for rank in tickets for ticket in rank}
        self._sources = {
            number: [
                ChannelSource([by_receiver[_id(number, rank, device)] for device in range(len(of_rank))])
                for rank, of_rank in enumerate(ranks)
            ]
            for number, ranks in wanted.items()
        }
        self._planned = groups

    def _spec(self, number: int, rank: int, device: int, boxes: list[Wanted] | None) -> ReceiverSpec:
        colocated = self._recipe.rollout.placement == "colocated"
        return ReceiverSpec(_id(number, rank, device), boxes, colocated)

    def _server_of(self, here: int, boxes: list[Wanted] | None) -> int:
        """The trainer's rank that serves a receiver: the one on its device; of separate ones that want whole tensors, one for
        all, which then sends them once."""
        if self._recipe.rollout.placement == "separate" and boxes is None:
            return 0
        return here % self._policy.n_ranks

    def _prove(self) -> float:
        """Compare both sides' fingerprints. Returns 1 where master weights have changed and nothing that is handed out has."""
        asked = self._policy.submit("weights", phase="sync")
        told = self._rollouts.ask("fingerprints", phase="sync")
        held: Sequence[EngineWeights] = asked.result()
        shapes = {name: shape for rank in held for name, shape in rank.shapes.items()}
        prints = [rank.fingerprints for rank in held]
        for number, ranks in told.items():
            unreadable = {name for _, names in ranks for name in names}
            found = compare(prints, [of_rank for of_rank, _ in ranks], shapes, unreadable)
            if found:
                raise mismatch(found, f"rollout-{number}")
        return self._look_at_masters(prints)

    def _look_at_masters(self, exported: Sequence[Fingerprints]) -> float:
        if self._masters is None:
            return 0.0
        before, self._told = self._told, Told(exported, self._masters)
        alarm = None if before is None else stuck(before, self._told)
        if alarm is not None:
            self._say(f"warning: {alarm}")
        return float(alarm is not None)


def _id(number: int, rank: int, device: int) -> str:
    return f"rollout-{number} rank {rank} device {device}"
