"""The proof of a sync, from the controller: what rollouts hold is what the trainer's ranks handed out.

Fingerprints of both sides are compared before anything is generated: every rank tells a vector of them, and with the first which
parts these are of (`quintet.sync.rank_fingerprints`). What a back end cannot read back is proved by
log-probs of fixed tokens, once it can compute. Master weights that changed while nothing that is handed out did raise an alarm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from quintet.controller.verbs import Policy
from quintet.models import ModelShape
from quintet.recipe import schema
from quintet.sync.logprob_probe import Movement, check, limits, sequences
from quintet.sync.proof import Comparison, Exported, exported_weights_unchanged, mismatch
from quintet.sync.rank_fingerprints import INDEX, RankFingerprints, ShardIndex

if TYPE_CHECKING:  # they bring Ray
    from quintet.cluster.calls import PendingCall
    from quintet.cluster.group import WorkerGroup

Copies = Callable[["PendingCall[Any]"], dict[str, list[RankFingerprints]]]
"""Asks for fingerprints of the weights that rollouts hold: of each copy, by name, by its ranks; one of a rollout that dies meanwhile is
left out. It is given what the trainer's ranks do at the same time, waited for too."""


class Proof:
    """The proof of one run's syncs. say: tells the user what is odd, and ends nothing."""

    def __init__(
        self, policy: WorkerGroup, recipe: schema.Recipe, shape: ModelShape, say: Callable[[str], None]
    ) -> None:
        self._policy, self._recipe, self._shape, self._say = policy, recipe, shape, say
        self._masters: list[int | None] | None = None
        self._before: Exported | None = None
        self._due = False  # whether masters are to be looked at: once for each change, however often weights are brought
        self._alone: dict[str, float] = {}
        self._indexes: dict[bytes, ShardIndex] = {}
        self._comparisons: dict[tuple[tuple[bytes, ...], tuple[bytes, ...]], Comparison] = {}
        self._unreadable = False
        self._expected: list[list[float]] = []
        self._movement = Movement()
        self.sequences: list[list[int]] = []
        """Fixed tokens that rollouts are to score once they can; empty when all could be read back."""

    @property
    def asked(self) -> bool:
        """Whether the recipe wants proofs."""
        return self._recipe.rollout.sync_proof

    def changed(self) -> None:
        """Note that the trainer has taken a step, or new master weights, and its optimizer state is there to be looked at."""
        if self.asked:
            self._masters, self._due = self._policy.all(Policy.masters, phase="masters")(), True

    def of(self, copies: Copies) -> dict[str, float]:
        """Compare what each copy of the rollout holds with what the trainer hands out; metrics. {} where the recipe wants no
        proofs, and nothing is asked.

        Raises SyncMismatch naming the tensors that differ.
        """
        if not self.asked:
            return {}
        began = time.perf_counter()
        telling = self._policy.all(Policy.fingerprints, phase="sync").submit()
        told = copies(telling)
        exported = telling.result()
        self._learn_indexes(chain(exported, *told.values()))
        self._compare(exported, told)
        self._unreadable = any(
            self._indexes[one.index].unreadable for ranks in told.values() for one in ranks
        )
        self._begin_probe()
        alone = self._look_at_masters(exported)
        return {**alone, "sync/proof_seconds": time.perf_counter() - began}

    def _learn_indexes(self, told: Iterable[RankFingerprints]) -> None:
        """Note what fingerprints are of, where that is news. Indexes of earlier syncs are forgotten."""
        known, self._indexes = self._indexes, {}
        for one in told:
            if one.index not in self._indexes:
                self._indexes[one.index] = known.get(one.index) or INDEX.load(one.parts, "a rank")

    def _compare(
        self, exported: Sequence[RankFingerprints], told: Mapping[str, Sequence[RankFingerprints]]
    ) -> None:
        """Raises SyncMismatch for the first copy that differs; those that tell the same are looked at once."""
        last, self._comparisons = self._comparisons, {}
        proved: list[Sequence[RankFingerprints]] = []
        for name, ranks in told.items():
            if ranks in proved:
                continue
            ours, theirs = tuple(one.index for one in exported), tuple(one.index for one in ranks)
            comparison = self._comparisons.get((ours, theirs)) or last.get((ours, theirs))
            if comparison is None:
                held = ([self._indexes[digest] for digest in side] for side in (ours, theirs))
                comparison = Comparison(*held)
            self._comparisons[ours, theirs] = comparison
            if found := comparison.differences(exported, ranks):
                raise mismatch(found, name)
            proved.append(ranks)

    def _look_at_masters(self, exported: Sequence[RankFingerprints]) -> dict[str, float]:
        """Whether their last change reached nothing that is handed out; {} where there is no earlier sync to compare with."""
        if self._masters is not None and self._due:
            self._due = False
            before, self._before = self._before, (exported, self._masters)
            alarm = None if before is None else exported_weights_unchanged(before, self._before)
            if alarm is not None:
                self._say(f"warning: {alarm}")
            self._alone = {} if before is None else {"sync/masters_alone": float(alarm is not None)}
        return self._alone

    # the probe

    def _begin_probe(self) -> None:
        """Have the trainer score fixed tokens, while its parameters are there."""
        self.sequences = []
        if self._unreadable:
            most = self._recipe.data.max_prompt_tokens + self._recipe.rollout.max_response_tokens
            self.sequences = sequences(self._shape.vocab_size, most, experts=self._shape.moe is not None)
            told = self._policy.all(Policy.score, phase="sync")(self.sequences)
            self._expected = next(one for one in told if one is not None)

    def of_probe(self, scored: Mapping[str, list[list[float]]]) -> dict[str, float]:
        """Compare the log-probs that each copy tells of `sequences` with the trainer's; metrics.

        Raises SyncMismatch saying where they are apart.
        """
        dtype = self._policy.one(Policy.parameter_type)()
        rollout, experts = self._recipe.rollout, self._shape.moe is not None
        within = limits(
            rollout.probe_tolerance,
            dtype,
            experts=experts,
            quantized=rollout.quantization is not None or self._recipe.engine.fp8 is not None,
        )
        gaps = [check(self._expected, its, self.sequences, within, name) for name, its in scored.items()]
        for name, its in scored.items():
            self._movement.check(self._expected, its, within.tolerance, name)
        return {"sync/probe_gap": max(gaps, default=0.0)}
