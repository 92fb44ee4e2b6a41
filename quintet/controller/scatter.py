"""Samples to the ranks that train on them: the plan from lengths alone, and what each rank gets, by reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from quintet.algorithms.advantages import Scored
from quintet.cluster.dispatch import megatron_pp_as_dp
from quintet.controller.batch_ref import BatchRef, Fields, Lease, MiniBatch, Placement, fresh_name
from quintet.controller.messages import Assignment
from quintet.controller.rollouts import Rollouts
from quintet.controller.samples import Samples
from quintet.controller.verbs import Policy
from quintet.data.batch import make_batch, select
from quintet.data.prompts import Prompt
from quintet.models import ModelShape
from quintet.packing.align import alignment_of
from quintet.packing.dynamic import plan_cells
from quintet.packing.measured import costs_of
from quintet.packing.plan import Plan, plan_microbatches, split_evenly, target_counts
from quintet.recipe import schema
from quintet.recipe.derived import moe_layers_of
from quintet.recipe.mtp import depths

if TYPE_CHECKING:  # they bring Ray
    from quintet.cluster.group import WorkerGroup

_Sent = tuple[list[Any], Assignment]
"""Of a mini-batch, a dp rank and a stage: references to its samples, and what to do with them."""


class Scatterer:
    """Plans and sends. placements: of all roles, each once. device: what the ranks compute on, by its name."""

    def __init__(
        self,
        workers: WorkerGroup,
        recipe: schema.Recipe,
        shape: ModelShape,
        placements: Sequence[Placement],
        device: str = "cpu",
    ) -> None:
        self._workers, self._recipe, self._placements = workers, recipe, placements
        self._shape, self._device = shape, device
        self._dropped: list[str] = []
        self._ahead = range(1, 2 + depths(recipe, shape))

    def plan(self, lengths: list[int], placement: Placement, names: Sequence[int] | None = None) -> Plan:
        """Assign samples of these lengths to a placement's ranks and micro-batches. names: their numbers in the batch, for errors."""
        layout = placement.layout
        aligned = partial(alignment_of, layout, engine=self._recipe.engine)
        coupled = -(-layout.expert_tp * layout.ep // layout.tp)  # neighbours with a layer's experts
        how: dict[str, Any] = {
            "dp": placement.dp,
            "cp": layout.cp,
            "budget": self._recipe.engine.tokens_per_microbatch_per_rank,
            "multiple": layout.pp if layout.vpp > 1 else 1,
            "key": "layout" if placement.name == "policy" else f"{placement.name}.layout",
            "names": names,
        }
        if layout.dynamic_cp:
            return plan_cells(
                lengths,
                alignment=aligned,
                costs=costs_of(self._shape, layout.tp, self._device)[0],
                coupled=coupled,
                fill=(layout.pp - 1) / layout.vpp,
                **how,
            )
        return plan_microbatches(
            lengths,
            alignment=aligned(layout.cp),
            quadratic=self._shape.quadratic,
            lockstep=coupled > layout.cp,  # experts span dp ranks
            **how,
        )

    def samples(self, samples: Samples, rollouts: Rollouts) -> BatchRef:
        """Send generated samples, which go straight from those that keep them. Mini-batches take whole groups."""
        parts = split_evenly(len(samples.prompts), self._recipe.train.mini_batches_per_step)
        chosen = [[i for i, g in enumerate(samples.groups) if g in part] for part in parts]
        minis = [mini for mini in chosen if mini]
        lengths = [one.tokens for one in samples.generated]
        prompts = [one.tokens - one.response_tokens for one in samples.generated]
        with_tokens = [i for i, one in enumerate(samples.generated) if one.kept is not None]
        replayed = set(with_tokens[: self._recipe.mismatch.replay_samples_per_step])
        scored = Scored(
            torch.tensor([one.worth for one in samples.rewards] or [0.0] * len(lengths)),
            torch.tensor(samples.groups),
        )

        def send(mini: list[int], plan: Plan, placement: Placement) -> list[_Sent]:
            order = [
                sorted((mini[i] for i in plan.samples_of(d)), key=samples.place.__getitem__)
                for d in range(placement.dp)
            ]
            layers = self._layers(placement)  # each dp rank's stages get their own of these, or all the same
            of_rollout = [
                [
                    [
                        (kept.call, kept.at)
                        for kept in map(samples.place.__getitem__, mine)
                        if kept.rollout == r
                    ]
                    for mine in order
                    for _ in layers
                ]
                for r in range(rollouts.count)
            ]
            parts = rollouts.slice_samples(of_rollout, [one for _ in order for one in layers])
            made = self._assignments(mini, plan, order, lengths, prompts, replayed)
            return [
                ([part[n] for part, places in zip(parts, of_rollout, strict=True) if places[n]], one)
                for d, one in enumerate(made)
                for p in range(placement.layout.pp)
                for n in [d * len(layers) + p % len(layers)]
            ]

        how = self._recipe.algorithm.aggregation
        aggregation = self._recipe.rollout.max_response_tokens if how == "fixed_length" else how
        batch = self._scatter(minis, lengths, send, scored, aggregation, samples)
        told = [one.name for one in self._placements if self._layers(one) != [None]]
        return batch | Fields(batch.name, {"routes": frozenset(told)} if told else {})

    def _layers(self, placement: Placement) -> list[list[int] | None]:
        """By stage the layers whose routes its ranks replay, numbered among those with experts; one None where they replay none."""
        if self._recipe.engine.replay_routes != "rollout" or placement.name != "policy":
            return [None]
        layout, shape, numbers = placement.layout, self._shape, self._shape.moe_layers
        stages = [moe_layers_of(layout, shape, stage) for stage in range(layout.pp)]
        return [[numbers.index(layer) for layer in stage] for stage in stages]

    def responses(self, prompts: Sequence[Prompt]) -> BatchRef:
        """Send prompts with the responses to imitate, as one mini-batch."""
        from quintet.cluster import ray_compat  # what is trained on, ranks of Ray's train on

        ids = [p.token_ids + p.response_ids for p in prompts]
        lengths, prompt_lengths = [len(x) for x in ids], [len(p.token_ids) for p in prompts]
        batch = make_batch(ids, prompt_lengths)

        def send(mini: list[int], plan: Plan, placement: Placement) -> list[_Sent]:
            order = [plan.samples_of(d) for d in range(placement.dp)]
            made = self._assignments(mini, plan, order, lengths, prompt_lengths, set())
            sent = [
                ([ray_compat.put(select(batch, mine))], one) for mine, one in zip(order, made, strict=True)
            ]
            return [one for one in sent for _ in range(placement.layout.pp)]

        return self._scatter([list(range(len(ids)))], lengths, send, None, "token_mean", None)

    def _assignments(
        self,
        mini: list[int],
        plan: Plan,
        order: list[list[int]],
        lengths: list[int],
        prompts: list[int],
        replayed: set[int],
    ) -> list[Assignment]:
        """What each dp rank does with its samples of a mini-batch, which arrive in `order`."""
        targets = target_counts([lengths[i] for i in mini], [prompts[i] for i in mini], self._ahead)
        at = {number: position for position, number in enumerate(mini)}
        return [
            Assignment(
                plan.local(d, [at[number] for number in mine]),
                mine,
                targets,
                len(mini),
                {number: k for k, number in enumerate(mine) if number in replayed},
            )
            for d, mine in enumerate(order)
        ]

    def _scatter(
        self,
        minis: list[list[int]],
        lengths: list[int],
        send: Callable[[list[int], Plan, Placement], list[_Sent]],
        scored: Scored | None,
        aggregation: str | int,
        samples: Samples | None,
    ) -> BatchRef:
        name, forget = fresh_name(), list(self._dropped)
        holders: dict[str, list[int]] = {}
        rounds: list[dict[str, int]] = [{} for _ in minis]
        metrics: dict[str, float] = {}
        for placement in self._placements if samples is not None else self._placements[:1]:
            plans = [self.plan([lengths[i] for i in mini], placement, mini) for mini in minis]
            sent = [send(mini, plan, placement) for mini, plan in zip(minis, plans, strict=True)]
            receive = self._workers.each(
                Policy.receive, megatron_pp_as_dp, phase="scatter", coords=placement.coords
            )
            receive(
                [list(of_rank) for of_rank in zip(*sent, strict=True)],
                batch=name,
                placement=placement.name,
                forget=forget,
                scored=scored,
                aggregation=aggregation,
            )
            pp = placement.layout.pp
            found = {n: at // pp for mini in sent for at, (_, one) in enumerate(mini) for n in one.numbers}
            holders[placement.name] = [found[n] for n in range(len(lengths))]
            for number, plan in enumerate(plans):
                rounds[number][placement.name] = len(plan.rounds)
            if placement is self._placements[0]:
                metrics = _modelled(plans)
        del self._dropped[: len(forget)]
        parts = tuple(MiniBatch(name, n, len(minis), of) for n, of in enumerate(rounds))
        return BatchRef(name, parts, holders, Lease(name, self._dropped), samples, metrics=metrics)


def _modelled(plans: list[Plan]) -> dict[str, float]:
    """How the times that a step's plans are modelled to take compare."""
    times = [plan.modelled for plan in plans if plan.modelled is not None]
    if not times:
        return {}
    time = sum(one.time for one in times)
    metrics = {"plan/time_over_bound": time / sum(one.bound for one in times)}
    static = [one.static for one in times if one.static is not None]
    if len(static) == len(times):
        metrics["plan/static_over_time"] = sum(static) / time
    return metrics
