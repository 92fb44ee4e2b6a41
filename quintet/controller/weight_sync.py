"""Weights from the trainer's ranks to rollouts in processes of their own, and the proof that they arrived.

Each rank that trains serves the receivers beside it (`quintet.sync.server`), straight from the ranks' shards, while the rollouts
take what comes. Nothing is generated before the proof (`quintet.controller.weight_check`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from quintet.cluster.calls import PendingCall
from quintet.cluster.group import WorkerGroup
from quintet.controller.verbs import Policy, Rollout
from quintet.controller.weight_check import Proof
from quintet.errors import SyncFailure
from quintet.observe.memory import GIB
from quintet.recipe import schema
from quintet.recipe.rollout import placement_of
from quintet.sync.rank_fingerprints import RankFingerprints
from quintet.sync.server import ReceiverSpec, Served
from quintet.sync.source import ChannelSource
from quintet.sync.wire import notify_absent

if TYPE_CHECKING:
    from quintet.controller.replicas import RolloutReplicas

Wants = dict[int, list[list[bytes | None]]]
"""What each receiver wants, packed, by rollout, rank and device: see `Rollout.receivers`."""


class WeightSync:
    """Brings the trainer's weights to all rollouts."""

    def __init__(
        self,
        policy: WorkerGroup,
        rollouts: RolloutReplicas,
        recipe: schema.Recipe,
        proof: Proof,
    ) -> None:
        self._policy, self._rollouts, self._recipe, self._proof = policy, rollouts, recipe, proof
        self._planned: list[WorkerGroup | None] = []
        # What receivers said before they had taken anything, where some could not tell what they need yet.
        self._before: Wants | None = None
        self._sources: dict[int, list[ChannelSource]] = {}

    def bring(self) -> dict[str, float]:
        """Transfer and prove, and tell what it took; rollouts that died are missing afterwards.

        Raises SyncMismatch naming the tensors that did not arrive as they were sent, SyncFailure naming a receiver that was
        not reached and may not be made anew.
        """
        began = time.perf_counter()
        self._follow()
        serving = self._policy.all(Policy.serve, phase="sync").submit()
        taking = {
            number: group.each(Rollout.update_weights, phase="sync").submit(self._sources[number])
            for number, group in enumerate(self._rollouts.groups)
            if group is not None and number in self._sources
        }
        for number, call in taking.items():
            call.others = partial(self._given_up, serving, number)
        self._rollouts.collect_survivors(taking, beside=serving, watch=self._watch(taking))
        served = serving.result()
        told = {
            "sync/seconds": time.perf_counter() - began,
            "sync/gib": sum(one.bytes for one in served) / GIB,
        }
        if None in self._rollouts.groups:  # all get them again, once it is there anew
            return told
        return told | self._proof.of(self._fingerprints)

    def _watch(self, taking: Mapping[int, PendingCall[Any]]) -> Callable[[], None]:
        """To be called while the rollouts take weights: once one has failed, the ranks that serve it need not wait for what has
        not come yet."""
        left = dict(taking)

        def look() -> None:
            for number in [number for number, call in left.items() if call.failed]:
                del left[number]
                for source in self._sources[number]:
                    for ticket in source.tickets:
                        threading.Thread(target=notify_absent, args=[ticket], daemon=True).start()

        return look

    def _given_up(self, serving: PendingCall[list[Served]], number: int) -> SyncFailure | None:
        """What the trainer tells of a rollout that it has given up, which itself may have no answer, or not know why."""
        if serving.waiting or serving.failed:
            return None
        lost = {who: why for served in serving.value() for who, why in served.lost.items()}
        for source in self._sources[number]:
            for ticket in source.tickets:
                if (why := lost.get(ticket.receiver)) is not None:
                    return SyncFailure(f"receiver {ticket.receiver} did not get the new weights: {why}")
        return None

    def _fingerprints(self, beside: PendingCall[Any]) -> dict[str, list[RankFingerprints]]:
        told = self._rollouts.ask(Rollout.fingerprints, phase="sync", beside=beside)()
        return {_name(number): ranks for number, ranks in told.items()}

    def _follow(self) -> None:
        """Plan anew when receivers have come or gone; and once more when they have taken weights for the first time, if that
        has shown one which parts it needs."""
        changed, before = self._planned != self._rollouts.groups, self._before
        if not changed and before is None:
            return
        wanted = self._rollouts.ask(Rollout.receivers, phase="sync")()
        unknown = any(boxes is None for ranks in wanted.values() for of_rank in ranks for boxes in of_rank)
        self._before = wanted if changed and unknown else None
        if changed or wanted != before:
            self._plan(wanted)

    def _plan(self, wanted: Wants) -> None:
        """Say who serves whom."""
        groups, placement = list(self._rollouts.groups), placement_of(self._recipe)
        assignments: list[list[ReceiverSpec]] = [[] for _ in range(self._policy.n_ranks)]
        alike: dict[Any, int] = {}
        for number, ranks in wanted.items():
            first = number * placement.devices_per_copy
            for rank, of_rank in enumerate(ranks):
                for device, boxes in enumerate(of_rank):
                    here = first + (rank if len(ranks) > 1 else device)
                    if placement.separate:
                        # Those that want the same are served by one rank, which sends it once.
                        here = alike.setdefault(boxes, len(alike))
                    spec = ReceiverSpec(_id(number, rank, device), boxes, not placement.separate)
                    assignments[here % self._policy.n_ranks].append(spec)
        tickets = self._policy.each(Policy.plan_sync, phase="sync")(assignments)
        by_receiver = {ticket.receiver: ticket for rank in tickets for ticket in rank}
        self._sources = {
            number: [
                ChannelSource([by_receiver[_id(number, rank, device)] for device in range(len(of_rank))])
                for rank, of_rank in enumerate(ranks)
            ]
            for number, ranks in wanted.items()
        }
        self._planned = groups


def _id(number: int, rank: int, device: int) -> str:
    return f"{_name(number)} rank {rank} device {device}"


def _name(number: int) -> str:
    return f"rollout-{number}"
