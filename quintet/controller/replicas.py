"""Rollouts in processes of their own, seen from the controller: one worker group a copy, so that one can die alone.

One that dies ends the run; or, with rollout.restart, it is made anew before anything else is generated. Nothing it
generated is lost by then: a copy of its samples is in the object store until they are scattered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from quintet.cluster.calls import PendingCall, outcomes, results
from quintet.cluster.cluster import Cluster
from quintet.cluster.dispatch import megatron_compute
from quintet.cluster.group import WorkerGroup
from quintet.cluster.process_probe import Location
from quintet.controller.rollouts import Call, Generating, Rollouts
from quintet.controller.sample_store import Place
from quintet.controller.verbs import Backend, Policy, Rollout, RolloutProcess
from quintet.controller.weight_check import Proof
from quintet.controller.weight_sync import WeightSync
from quintet.errors import QuintetError, Stopped, SyncFailure, UserError, WorkerFailure
from quintet.recipe import schema
from quintet.recipe.rollout import placement_of

P = ParamSpec("P")
T = TypeVar("T")
RESTARTS_IN_A_ROW = 3
"""How often a rollout is made anew before it has generated anything; then the run ends."""


def check_room(cluster: Cluster, recipe: schema.Recipe) -> None:
    """Raise a UserError, before anything starts, when the cluster cannot hold trainer and separate rollouts."""
    if recipe.rollout.ranks is not None:  # which separate rollouts have
        wanted = {"cluster.ranks": recipe.cluster.ranks, "rollout.ranks": recipe.rollout.ranks}
        cluster.check_devices(
            wanted, "or set rollout.placement=colocated, which shares the trainer's devices"
        )


class RolloutReplicas(Rollouts):
    """All rollouts of a run. policy: the trainer's ranks, on whose devices colocated ones sit."""

    apart = True

    def __init__(
        self, cluster: Cluster, recipe: schema.Recipe, model_dir: Path, policy: WorkerGroup, proof: Proof
    ) -> None:
        super().__init__()
        self._cluster, self._recipe, self._model_dir, self._policy = cluster, recipe, model_dir, policy
        self._placement = placement_of(recipe)
        self.colocated = not self._placement.separate
        self.groups: list[WorkerGroup | None] = [None] * self._placement.copies
        self._kept: dict[str, dict[int, tuple[WorkerGroup, Any]]] = {}
        """By call and rollout, whose ranks keep the samples, and the copy of these in the object store."""
        self._restarts = [0] * len(self.groups)
        self._proof = proof
        self._weights = WeightSync(policy, self, recipe, proof)

    @property
    def count(self) -> int:
        return len(self.groups)

    def missing(self) -> bool:
        """Return whether one is not there: not started yet, or lost."""
        return None in self.groups

    # life and death

    def start(self) -> None:
        """Start those that are missing, all at once; the trainer's ranks connect meanwhile. An error that ends the run ends the others'
        start too."""
        connecting = self._policy.all(Policy.open_server, phase="sync").submit()
        absent = [number for number, group in enumerate(self.groups) if group is None]
        given_up = threading.Event()
        pool = ThreadPoolExecutor(len(absent))
        starting = {pool.submit(self._start_one, number, given_up): number for number in absent}
        try:
            for done in as_completed(starting):
                number, made = starting[done], done.result()
                if isinstance(made, QuintetError):
                    self._lose(number, made)
                else:
                    self.groups[number] = made
            connecting.result()
        except Stopped:
            raise
        except QuintetError:
            given_up.set()
            pool.shutdown()
            raise
        finally:  # Ctrl-C, SIGTERM: what still starts is cut off when its cluster goes
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _start_one(self, number: int, given_up: threading.Event) -> WorkerGroup | QuintetError:
        ranks, size = self._placement.ranks_per_copy, self._placement.devices_per_copy
        beside = None
        try:
            if self.colocated:
                there = self._policy.locations[number * size : (number + 1) * size]
                beside = [[one] for one in there] if ranks == size else [there]
                self._check_node(number, beside)
            made = WorkerGroup(
                self._cluster,
                RolloutProcess,
                ranks,
                name=f"rollout-{number}",
                named_in_messages=True,
                pack=True,
                devices_per_rank=size // ranks,
                colocate_with=beside,
                cancel=given_up,
                recipe=self._recipe,
                model_dir=self._model_dir,
            )
            try:
                made.coords()  # now: whoever needs them later submits calls, and expects no error of that
            except QuintetError:
                made.close()
                raise
            return made
        except QuintetError as error:
            return error

    def _check_node(self, number: int, beside: Sequence[Sequence[Location]]) -> None:
        """One process drives devices of its own node alone."""
        for others in beside:
            if len({other.node_id for other in others}) > 1:
                raise UserError(
                    f"rollout-{number}: rollout.layout.tp × pp = {len(others)} devices of a {self._recipe.rollout.backend} rollout "
                    f"are to be on one node, and the ranks it sits beside are not; set cluster.ranks_per_node to a multiple of "
                    f"{len(others)}, or use a smaller rollout.layout"
                )

    def _lose(self, number: int, failure: QuintetError) -> None:
        """Note that one is gone; raises its failure where it is not to be made anew."""
        if not self._recipe.rollout.restart or not isinstance(failure, WorkerFailure | SyncFailure):
            raise failure
        self._restarts[number] += 1
        if self._restarts[number] > RESTARTS_IN_A_ROW:
            failure.message += f"\nrollout-{number} was started anew {RESTARTS_IN_A_ROW} times in a row before; the run ends."
            raise failure
        group, self.groups[number] = self.groups[number], None
        if group is not None:
            group.close()
        told = failure.message.split("\n", 1)[0]
        self._cluster.say(f"{told}. It is started anew ({self._restarts[number]} of {RESTARTS_IN_A_ROW})")

    def collect_survivors(
        self,
        calls: Mapping[int, PendingCall[T]],
        beside: PendingCall[Any] | None = None,
        watch: Callable[[], None] | None = None,
    ) -> dict[int, T]:
        """Return the values by rollout, of those that do not fail meanwhile. beside: what the trainer's ranks do at the same
        time."""
        waited = [*calls.values(), *([] if beside is None else [beside])]
        if not self._recipe.rollout.restart:
            return dict(zip(calls, results(waited, watch), strict=False))
        found = outcomes(waited, watch)
        if beside is not None and isinstance(found[-1], QuintetError):
            raise found[-1]
        values = dict(zip(calls, found, strict=False))
        failed = {number: value for number, value in values.items() if isinstance(value, QuintetError)}
        # Weights also stop coming to those that share a channel with one that died: these get them again with it.
        causes = {n: error for n, error in failed.items() if not isinstance(error, SyncFailure)} or failed
        for number, error in causes.items():
            self._lose(number, error)
        return {number: value for number, value in values.items() if not isinstance(value, QuintetError)}

    def memory(self) -> list[dict[str, float | None]]:
        """Return the memory peaks of every rank that answers."""
        found = self.ask(RolloutProcess.memory, phase="memory")()
        return [rank for ranks in found.values() for rank in ranks]

    # generation

    def generate(self, call: Call) -> list[int]:
        """Generate: see `Rollouts.generate`. Rollouts that die meanwhile are missing afterwards."""
        for old in call.forget:
            self._kept.pop(old, None)
        calls: dict[int, PendingCall[Any]] = {}
        with self._speaking:
            self._under_way = []
            for number, requests in call.shares.items():
                group = self._there(number)
                generate = group.stream(Rollout.generate, megatron_compute, phase="generate")
                pending = generate.submit(
                    [requests], sampling=call.sampling, call=call.name, forget=call.forget
                )
                pending.heard = lambda rank, told, number=number: call.heard(number, *told)  # type: ignore[misc]
                calls[number] = pending
                owners = megatron_compute.owners(group.coords())
                self._under_way.append(Generating(group, pending, call.name, owners))
        made = self.collect_survivors(calls, watch=call.watch)
        self._under_way = []
        for number, ((_, spare),) in made.items():
            self._kept.setdefault(call.name, {})[number] = self._there(number), spare
            self._restarts[number] = 0
        return list(made)

    def slice_samples(
        self, chosen: list[list[list[Place]]], layers: list[list[int] | None]
    ) -> list[list[Any]]:
        receivers = len(chosen[0])
        made_by = [sorted({call for places in of_rollout for call, _ in places}) for of_rollout in chosen]
        calls = {
            number: group.all(
                Rollout.slice_samples, told_by=megatron_compute, num_returns=1 + receivers
            ).submit(chosen[number], layers)
            for number, group in enumerate(self.groups)
            # one made anew since has nothing
            if group is not None and all(self._kept[call][number][0] is group for call in made_by[number])
        }
        parts_of = {number: list(parts[1:]) for number, (parts,) in self.collect_survivors(calls).items()}
        for number in set(range(self.count)) - parts_of.keys():
            _, *parts_of[number] = self._policy.one(
                Policy.scatter_backup, phase="slice_samples", num_returns=1 + receivers
            )({call: [self._kept[call][number][1]] for call in made_by[number]}, chosen[number], layers)
        return [parts_of[number] for number in range(self.count)]

    def _there(self, number: int) -> WorkerGroup:
        group = self.groups[number]
        assert group is not None, f"rollout-{number} is gone"
        return group

    # weights

    def mark_weights_updated(self) -> None:
        """Note that the trainer has taken a step, or new master weights."""
        self._proof.changed()

    def take_weights(self) -> dict[str, float]:
        """Bring the present weights to all that are there: see `WeightSync.bring`."""
        return self._weights.bring()

    def probe(self) -> dict[str, float]:
        """Prove by log-probs what could not be read back."""
        if not self._proof.sequences or self.missing():
            return {}
        told = self.ask(Backend.score, phase="sync")(self._proof.sequences)
        return self._proof.of_probe({f"rollout-{number}": ranks[-1] for number, ranks in told.items()})

    def ask(
        self, verb: Callable[Concatenate[Any, P], T], phase: str, beside: PendingCall[Any] | None = None
    ) -> Callable[P, dict[int, list[T]]]:
        """Ask a verb of all replicas that are there: what each rank answers, by rollout, of those that do not die. beside: as in
        `collect_survivors`."""

        def asked(*args: P.args, **kwargs: P.kwargs) -> dict[int, list[T]]:
            alive = {number: group for number, group in enumerate(self.groups) if group is not None}
            calls = {n: group.all(verb, phase=phase).submit(*args, **kwargs) for n, group in alive.items()}
            return self.collect_survivors(calls, beside)

        return asked
