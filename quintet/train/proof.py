"""The proof of a sync, from the controller: what rollouts hold is what the trainer's ranks handed out.

Fingerprints of both sides are compared before anything is generated. What a back end cannot read back is proved by log-probs
of fixed tokens, once it can compute. Master weights that changed while nothing that is handed out did raise an alarm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from quintet.cluster.dispatch import rank_zero
from quintet.cluster.group import WorkerGroup
from quintet.models import ModelShape
from quintet.recipe import schema
from quintet.rollout import Fingerprints
from quintet.sync.probe import Movement, check, default_tolerance, sequences
from quintet.sync.proof import Told, compare, mismatch, stuck
from quintet.train.messages import EngineWeights


class Proof:
    """Of one run's syncs. say: tells the user what is odd, and ends nothing."""

    def __init__(
        self, policy: WorkerGroup, recipe: schema.Recipe, shape: ModelShape, say: Callable[[str], None]
    ) -> None:
        self._policy, self._recipe, self._shape, self._say = policy, recipe, shape, say
        self._masters: list[int | None] | None = None
        self._told: Told | None = None
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
        """The trainer has taken a step, and its optimizer state is still there to be looked at."""
        if self.asked:
            self._masters = self._policy.call("masters", phase="sync")

    def of_asked(
        self, ask: Callable[[], Mapping[str, Sequence[tuple[Fingerprints, list[str]]]]]
    ) -> dict[str, float]:
        """`of` what `ask` tells, and how long both took; {} where the recipe wants no proofs, and nothing is asked."""
        if not self.asked:
            return {}
        began = time.perf_counter()
        told = self.of(ask())
        return told | {"sync/proof_seconds": time.perf_counter() - began}

    def of(self, copies: Mapping[str, Sequence[tuple[Fingerprints, list[str]]]]) -> dict[str, float]:
        """Compare what each copy of the rollout holds, told by its ranks, with what the trainer hands out; metrics.

        Raises SyncMismatch naming the tensors that differ.
        """
        held: list[EngineWeights] = self._policy.call("weights", phase="sync")
        shapes = {name: shape for rank in held for name, shape in rank.shapes.items()}
        prints = [rank.fingerprints for rank in held]
        self._unreadable = False
        proved: list[Sequence[tuple[Fingerprints, list[str]]]] = []
        for name, ranks in copies.items():
            if ranks in proved:
                continue  # to see that it holds the same costs a twentieth of comparing it with the trainer
            proved.append(ranks)
            unreadable = {one for _, names in ranks for one in names}
            found = compare(prints, [of_rank for of_rank, _ in ranks], shapes, unreadable)
            if found:
                raise mismatch(found, name)
            self._unreadable = self._unreadable or bool(unreadable)
        self._begin_probe()
        return {"sync/masters_alone": self._look_at_masters(prints)}

    def _look_at_masters(self, exported: Sequence[Fingerprints]) -> float:
        if self._masters is None:
            return 0.0
        before, self._told = self._told, Told(exported, self._masters)
        alarm = None if before is None else stuck(before, self._told)
        if alarm is not None:
            self._say(f"warning: {alarm}")
        return float(alarm is not None)

    # the probe

    def _begin_probe(self) -> None:
        """Have the trainer score fixed tokens, while its parameters are there."""
        self.sequences = []
        if self._unreadable:
            most = self._recipe.data.max_prompt_tokens + self._recipe.rollout.max_response_tokens
            self.sequences = sequences(self._shape.vocab_size, most)
            told = self._policy.call("score", sequences=self.sequences, phase="sync")
            self._expected = next(one for one in told if one is not None)

    def of_probe(self, scored: Mapping[str, list[list[float]]]) -> dict[str, float]:
        """Compare the log-probs that each copy tells of `sequences` with the trainer's; metrics.

        Raises SyncMismatch saying where they are apart.
        """
        allowed = self._recipe.rollout.probe_tolerance
        if allowed is None:
            dtype = self._policy.call("parameter_type", dispatch=rank_zero)
            allowed = default_tolerance(dtype, experts=self._shape.moe is not None)
        gaps = [check(self._expected, its, self.sequences, allowed, name) for name, its in scored.items()]
        for name, its in scored.items():
            self._movement.check(self._expected, its, allowed, name)
        return {"sync/probe_gap": max(gaps, default=0.0)}
