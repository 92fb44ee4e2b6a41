"""The proof of a sync, from the controller: what rollouts hold is what the trainer's ranks handed out.

Fingerprints of both sides are compared before anything is generated: every rank tells a digest of its own, and one rank of those
that tell the same is asked what it stands for, unless that is known (`quintet.sync.evidence`). What a back end cannot read back is
proved by log-probs of fixed tokens, once it can compute. Master weights that changed while nothing that is handed out did raise an
alarm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from quintet.cluster.calls import PendingCall
from quintet.cluster.dispatch import rank_zero, some
from quintet.cluster.group import WorkerGroup
from quintet.models import ModelShape
from quintet.recipe import schema
from quintet.sync.evidence import Evidence
from quintet.sync.logprob_probe import Movement, check, default_tolerance, sequences
from quintet.sync.proof import Told, exported_weights_unchanged, mismatch
from quintet.sync.witness import Digest, Statement


class Copies(Protocol):
    """Copies of the weights that rollouts hold, by name; one of a rollout that dies meanwhile is left out. beside: what the
    trainer's ranks do at the same time, waited for too."""

    def digests(self, beside: PendingCall) -> dict[str, list[Digest]]:
        """Of each copy, by its ranks."""
        ...

    def statements(
        self, wanted: Mapping[str, list[int]], known: list[bytes], beside: PendingCall | None
    ) -> dict[str, list[Statement]]:
        """What the last digests of some ranks stand for, by copy. known: as in `Witness.statement`."""
        ...


class Proof:
    """Of one run's syncs. say: tells the user what is odd, and ends nothing."""

    def __init__(
        self, policy: WorkerGroup, recipe: schema.Recipe, shape: ModelShape, say: Callable[[str], None]
    ) -> None:
        self._policy, self._recipe, self._shape, self._say = policy, recipe, shape, say
        self._masters: list[int | None] | None = None
        self._told: Told | None = None
        self._due = False  # whether masters are to be looked at: once for each change, however often weights are brought
        self._alone: dict[str, float] = {}
        self._evidence = Evidence()
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
        """The trainer has taken a step, or new master weights, and its optimizer state is there to be looked at."""
        if self.asked:
            self._masters, self._due = self._policy.call("masters", phase="sync"), True

    def of(self, copies: Copies) -> dict[str, float]:
        """Compare what each copy of the rollout holds with what the trainer hands out; metrics. {} where the recipe wants no
        proofs, and nothing is asked.

        Raises SyncMismatch naming the tensors that differ.
        """
        if not self.asked:
            return {}
        began = time.perf_counter()
        telling = self._policy.submit("digest", phase="sync")
        told = copies.digests(telling)
        exported: list[Digest] = telling.result()
        self._evidence.begin([*exported, *(one for ranks in told.values() for one in ranks)])
        told = self._hear(exported, told, copies)
        for name, ranks in told.items():
            found = self._evidence.differences(exported, ranks)
            if found:
                raise mismatch(found, name)
        self._unreadable = any(self._evidence.unreadable(ranks) for ranks in told.values())
        self._begin_probe()
        alone = self._look_at_masters(exported)
        return {**alone, "sync/proof_seconds": time.perf_counter() - began}

    def _hear(
        self, exported: Sequence[Digest], told: dict[str, list[Digest]], copies: Copies
    ) -> dict[str, list[Digest]]:
        """Have told what unknown digests stand for, each by the first rank that has it; the copies that did not die of it."""
        while lacking := self._evidence.lacking(exported, told.values()):
            mine = _pick(exported, lacking)
            theirs = {name: found for name, ranks in told.items() if (found := _pick(ranks, lacking))}
            known = self._evidence.known
            beside = None
            if mine:
                ranks = some(list(mine.values()))
                beside = self._policy.submit("statement", known, dispatch=ranks, phase="sync")
            wanted = {name: list(found.values()) for name, found in theirs.items()}
            heard = copies.statements(wanted, known, beside)
            if beside is not None:
                self._evidence.take(dict(zip(mine, beside.result(), strict=True)))
            for name, statements in heard.items():
                self._evidence.take(dict(zip(theirs[name], statements, strict=True)))
            told = {name: ranks for name, ranks in told.items() if name in heard or name not in theirs}
        return told

    def _look_at_masters(self, exported: Sequence[Digest]) -> dict[str, float]:
        """Whether their last change reached nothing that is handed out; {} where there is no earlier sync to compare with."""
        if self._masters is not None and self._due:
            self._due = False
            before, self._told = self._told, Told(exported, self._masters)
            alarm = None if before is None else exported_weights_unchanged(before, self._told)
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
            experts, quantized = self._shape.moe is not None, self._recipe.rollout.quantization is not None
            allowed = default_tolerance(dtype, experts=experts, quantized=quantized)
        gaps = [check(self._expected, its, self.sequences, allowed, name) for name, its in scored.items()]
        for name, its in scored.items():
            self._movement.check(self._expected, its, allowed, name)
        return {"sync/probe_gap": max(gaps, default=0.0)}


def _pick(ranks: Sequence[Digest], wanted: set[Digest]) -> dict[Digest, int]:
    """The first rank with each of the wanted digests, which are wanted no more."""
    found = {}
    for rank, digest in enumerate(ranks):
        if digest in wanted:
            wanted.remove(digest)
            found[digest] = rank
    return found
