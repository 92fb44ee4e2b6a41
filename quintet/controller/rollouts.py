"""Who generates, seen from the controller: what controller and hybrid ask of rollouts, and those in the trainer's processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from quintet.cluster.calls import PendingCall, results
from quintet.cluster.group import WorkerGroup
from quintet.controller.colocation import Sleepers
from quintet.controller.messages import SampleInfo
from quintet.controller.sample_store import Place
from quintet.controller.verbs import Policy
from quintet.controller.weight_check import Proof
from quintet.recipe import schema
from quintet.recipe.rollout import placement_of
from quintet.rollout import Part, Request, Sampling
from quintet.sync.rank_fingerprints import RankFingerprints, ShardIndex


class Rollouts(Sleepers, Protocol):
    """Copies of the rollout, numbered; each keeps the samples that it generated last."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def generate(
        self,
        shares: Mapping[int, list[Request]],
        sampling: Sampling,
        call: str,
        forget: list[str],
        watch: Callable[[], None],
    ) -> dict[int, list[list[SampleInfo]]]:
        """Generate each rollout's share of the requests: what came out, by rollout, request and sample. One that died
        meanwhile, where it may, has no entry. The samples are kept under the name `call`, those of `forget` no longer."""
        ...

    def posted(self) -> int:
        """Sequences finished in the call under way."""
        ...

    def slice_samples(self, chosen: list[list[list[Place]]]) -> list[list[Any]]:
        """Cut kept samples: by rollout and dp rank, calls and positions; references to what each dp rank gets."""
        ...

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """What one of them makes of these tokens: see `Rollout.score`."""
        ...

    def memory(self) -> list[dict[str, float | None]]:
        """Memory peaks of ranks that do nothing else."""
        ...

    def counts(self) -> dict[str, float]:
        """What they counted since the last time: see `Rollout.metrics`."""
        ...


class InProcessRolloutGroup:
    """Rollouts in the trainer's processes: one a dp rank of the rollout's layout."""

    colocated = True
    apart = False

    def __init__(self, workers: WorkerGroup, recipe: schema.Recipe, proof: Proof) -> None:
        self._workers, self._proof = workers, proof
        self._travel = not placement_of(recipe).shares_weights
        self._coords = workers.all(Policy.rollout_coords)()
        last = max(c["pp"] for c in self._coords)
        owners = [r for r, c in enumerate(self._coords) if (c["tp"], c["cp"], c["pp"]) == (0, 0, last)]
        self._owners = sorted(owners, key=lambda rank: self._coords[rank]["dp"])

    @property
    def count(self) -> int:
        return len(self._owners)

    def generate(
        self,
        shares: Mapping[int, list[Request]],
        sampling: Sampling,
        call: str,
        forget: list[str],
        watch: Callable[[], None],
    ) -> dict[int, list[list[SampleInfo]]]:
        answers = self._workers.each(Policy.generate, phase="generate").submit(
            [shares[c["dp"]] for c in self._coords], sampling=sampling, call=call, forget=forget
        )
        told = answers.result(watch)
        return {number: told[rank] for number, rank in enumerate(self._owners)}

    def posted(self) -> int:
        return self._workers.posted(self._owners)

    def slice_samples(self, chosen: list[list[list[Place]]]) -> list[list[Any]]:
        receivers = len(chosen[0])
        nothing: list[list[Any]] = [[] for _ in range(receivers)]
        by_rank = {rank: at for at, rank in enumerate(self._owners)}
        ranks = range(len(self._coords))
        parts = self._workers.each(Policy.slice_samples, num_returns=1 + receivers)(
            [chosen[by_rank[rank]] if rank in by_rank else nothing for rank in ranks]
        )
        return [list(parts[rank][1:]) for rank in self._owners]

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        by_rank = [sequences if c["dp"] == 0 else [] for c in self._coords]
        return self._workers.each(Policy.rollout_scores, phase="generate")(by_rank)[self._owners[0]]

    def missing(self) -> bool:
        return False

    def start(self) -> None:
        """They live and die with the trainer's ranks."""

    def sleep(self, level: int) -> None:
        self._workers.all(Policy.sleep_rollout, phase="sleep")(level)

    def wake(self, part: Part) -> None:
        self._workers.all(Policy.wake_rollout, phase="wake")(part)

    def pause(self) -> None:
        """Nothing is under way between two calls."""

    def resume(self) -> None:
        """Nothing was held."""

    def mark_weights_updated(self) -> None:
        if self._travel:
            self._proof.changed()

    def take_weights(self) -> dict[str, float]:
        if not self._travel:  # the proof is that both are one storage
            return {}
        began = time.perf_counter()
        self._workers.all(Policy.sync)()
        told = {"sync/seconds": time.perf_counter() - began}
        return told | self._proof.of(self)

    # the copies, as the proof asks for them: see `quintet.controller.weight_check.Copies`

    def fingerprints(self, beside: PendingCall[Any]) -> dict[str, list[RankFingerprints]]:
        told, _ = results([self._workers.all(Policy.rollout_fingerprints, phase="sync").submit(), beside])
        return {name: [told[rank] for rank in ranks] for name, ranks in self._copies().items()}

    def shard_indexes(self, wanted: Mapping[str, list[int]]) -> dict[str, list[ShardIndex]]:
        copies = self._copies()
        ranks = [copies[name][at] for name, places in wanted.items() for at in places]
        told = iter(self._workers.some(ranks, Policy.rollout_shard_index, phase="sync")())
        return {name: [next(told) for _ in places] for name, places in wanted.items()}

    def _copies(self) -> dict[str, list[int]]:
        """The ranks of each rollout, by its name."""
        copies: dict[str, list[int]] = {}
        for rank, at in enumerate(self._coords):
            copies.setdefault(f"the rollout of dp rank {at['dp']}", []).append(rank)
        return copies

    def probe(self) -> dict[str, float]:
        return {}

    def memory(self) -> list[dict[str, float | None]]:
        return []

    def counts(self) -> dict[str, float]:
        return {}
