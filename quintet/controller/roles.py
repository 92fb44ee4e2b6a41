"""A role of a run, seen from the controller: an engine with a purpose and a layout, as verbs over the ranks.

Roles share the ranks and their processes (`quintet.controller.engines`). What a verb needs of a batch is in the batch that it is
given: nothing is kept here between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.algorithms.advantages import Advantages
from quintet.cluster.dispatch import megatron_compute
from quintet.controller.batch_ref import BatchRef, Fields, MiniBatch, Placement
from quintet.controller.messages import MiniBatchTold, OptimizerTold, PartedRoutes, RouteUse, joined
from quintet.controller.objective import Objective, ValueObjective
from quintet.controller.progress_bar import watched
from quintet.controller.verbs import Policy
from quintet.observe.progress import Progress
from quintet.recipe.schema import Optimizer

if TYPE_CHECKING:  # they bring Ray
    from quintet.cluster.group import WorkerGroup

Phase = Callable[[str], AbstractContextManager[None]]


class Role:
    """The policy, a reference policy, a critic. phase: times a part of the run."""

    def __init__(
        self, name: str, workers: WorkerGroup, placement: Placement, phase: Phase, progress: Progress | None
    ) -> None:
        self.name, self.placement = name, placement
        self._workers, self._phase, self._progress = workers, phase, progress

    def forward(
        self,
        batch: BatchRef,
        field: str,
        temperature: float = 1.0,
        to: Sequence[Role] = (),
        routes: RouteUse | None = None,
    ) -> Fields:
        """Score every trained token: log-probs, or a critic's values, as a field. to: roles whose ranks need it besides. routes:
        what is recorded, which then is the field `routes`, or replayed. Raises ValueError for routes that no ranks hold."""
        where = self.placement.name
        if routes not in (None, "record"):
            batch.need(["routes"], where)
        with self._phase("logprob"):
            self._workers.all(Policy.score_batch, phase="logprob")(
                batch=batch.name,
                role=self.name,
                placement=where,
                field=field,
                temperature=temperature,
                routes=routes,
            )
            made = self.send(batch, [field], to)
        recorded = {"routes": frozenset({where})} if routes == "record" else {}
        return Fields(batch.name, {**made.held, **recorded})

    def advantages(self, batch: BatchRef, way: Advantages, to: dict[str, Role] | None = None) -> Fields:
        """Make advantages of rewards and scores, on this role's ranks. to: by field, a role whose ranks need it besides.

        Raises ValueError for a score that they do not hold.
        """
        where = self.placement.name
        batch.need(way.reads, where)
        with self._phase("advantages"):
            self._workers.all(Policy.advantages)(batch=batch.name, placement=where, way=way)
            held = {name: frozenset({where}) for name in way.writes}
            for name, role in (to or {}).items():
                held |= self.send(batch, [name], [role]).held
        return Fields(batch.name, held)

    def send(self, batch: BatchRef, fields: list[str], to: Sequence[Role]) -> Fields:
        """Bring fields that this role's ranks hold to those of other roles, sample by sample, and not by the controller."""
        held = {name: {self.placement.name} for name in fields}
        for placement in {role.placement.name: role.placement for role in to}.values():
            if placement.name == self.placement.name:
                continue
            holders = batch.holders[placement.name]
            wanted = [[n for n, d in enumerate(holders) if d == rank] for rank in range(placement.dp)]
            told = self._workers.all(
                Policy.tell_fields,
                told_by=megatron_compute,
                coords=self.placement.coords,
                num_returns=1 + placement.dp,
            )(batch=batch.name, placement=self.placement.name, fields=fields, wanted=wanted)
            self._workers.each(Policy.take_fields, megatron_compute, coords=placement.coords)(
                [[parts[1 + d] for parts in told] for d in range(placement.dp)],
                batch=batch.name,
                placement=placement.name,
                fields=fields,
            )
            for name in fields:
                held[name].add(placement.name)
        return Fields(batch.name, {name: frozenset(where) for name, where in held.items()})

    def start_optimizer(self, optimizer: Optimizer, total_steps: int) -> None:
        """Start a fresh optimizer on the present weights: see `Engines.start_optimizer`."""
        self._workers.all(Policy.start_optimizer, phase="optimizer")(optimizer, total_steps, self.name)

    def forward_backward(self, mini: MiniBatch, objective: Objective | ValueObjective) -> list[MiniBatchTold]:
        """Compute the gradients of a mini-batch: what each rank tells of it. They are those of `optimizer_step`; a second
        mini-batch before it is an error. Raises ValueError for a field that the objective reads and these ranks do not hold."""
        of = f", mini-batch {mini.number + 1} of {mini.total}" if mini.total > 1 else ""
        who = "training" if self.name == "policy" else f"training the {self.name}"
        total = mini.rounds[self.placement.name]
        mini.need(objective.reads, self.placement.name)
        with (
            self._phase("train"),
            watched(self._progress, f"{who}{of}", total, "micro-batches", self._trained) as watch,
        ):
            forward_backward = self._workers.all(
                Policy.forward_backward,
                phase="train",
                told_by=megatron_compute,
                coords=self.placement.coords,
            )
            told = forward_backward.submit(
                batch=mini.batch,
                number=mini.number,
                role=self.name,
                placement=self.placement.name,
                objective=objective,
            ).result(watch)
        found = [one for one in told if one is not None]
        assert len(found) == len(told), "a rank of the last stage told nothing of its mini-batch"
        if objective.routes is not None:
            found[0] = replace(found[0], parted=self._parted(mini))
        return found

    def _parted(self, mini: MiniBatch) -> PartedRoutes:
        """Of all ranks: each has its own stage's layers, and its own tokens."""
        total: PartedRoutes = {}
        for one in self._workers.all(Policy.parted_routes)(
            batch=mini.batch, number=mini.number, placement=self.placement.name
        ):
            total = joined(total, one)
        return total

    def optimizer_step(self) -> OptimizerTold:
        """Take one step on the gradients of the mini-batch before; without one, an error."""
        with self._phase("train"):
            return self._workers.all(Policy.optimizer_step, phase="train")(role=self.name)[0]

    def _trained(self) -> int:
        """Micro-batches done in the call under way."""
        return self._workers.posted([self.placement.teller])

    # checkpoints

    def save(self, path: Path) -> list[str]:
        """Begin to write the role's whole state to a new directory; returns when training may go on, with what went wrong on
        the ranks."""
        errors = self._workers.all(Policy.save_checkpoint, phase="checkpoint")(path.absolute(), self.name)
        return [error for error in errors if error is not None]

    def load(self, path: Path) -> None:
        """Take up a saved state."""
        self._workers.all(Policy.load_checkpoint, phase="checkpoint")(path.absolute(), self.name)


class PolicyRole(Role):
    """The role whose weights generate. publish: what tells the rollouts of new ones."""

    def __init__(self, *of_role: object, mark: Callable[[], None]) -> None:
        super().__init__(*of_role)  # type: ignore[arg-type]
        self._mark, self._moved = mark, False

    def optimizer_step(self) -> OptimizerTold:
        """Take one step on the gradients of the mini-batch before: see `Role.optimizer_step`."""
        self._moved = True
        return super().optimizer_step()

    def publish(self) -> None:
        """Mark the weights as new, if steps were taken since the last time: they are moved when the rollout wakes, or now to one
        that has its own devices."""
        if self._moved:
            self._moved = False
            with self._phase("sync"):
                self._mark()
