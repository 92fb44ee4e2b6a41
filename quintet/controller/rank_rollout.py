"""One rank's part of a rollout: a back end behind the protocol, and the samples that it generated.

The controller calls its verbs, and those of the back end (`quintet.controller.rollouts`), whether the rank trains too or has a process
of its own. Ranks of a native rollout share requests; the engines of other back ends make their own workers, and have one rank here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

from quintet.cluster.lane import listening
from quintet.cluster.progress import Progress
from quintet.controller.messages import SampleInfo
from quintet.controller.sample_store import Place, SampleStore
from quintet.data.batch import Batch
from quintet.data.routes import RouteSizes
from quintet.recipe import schema
from quintet.rollout.base import WANTED, Request, Rollout, Sample, Sampling, WeightSource
from quintet.sync.rank_fingerprints import RankFingerprints, RankIndexer


class RankRollout:
    """What the controller asks of it. at: this rank's place in the rollout's layout; owns_output: whether it tells what came out.
    routes: of the model, where updates replay those that come out."""

    def __init__(
        self,
        backend: Rollout,
        recipe: schema.Recipe,
        progress: Progress,
        at: Mapping[str, int],
        *,
        owns_output: bool,
        routes: RouteSizes | None = None,
    ) -> None:
        self.backend, self._progress = backend, progress
        self._at, self._owns_output = dict(at), owns_output
        self._spare = recipe.rollout.restart
        self.samples = SampleStore(recipe.mismatch.replay_samples_per_step, routes)
        self._indexer = RankIndexer()

    def coords(self) -> dict[str, int]:
        """Return this rank's place in the rollout's layout."""
        return self._at

    # generation

    def generate(
        self, requests: list[Request], *, sampling: Sampling, call: str, forget: list[str]
    ) -> Generator[tuple[int, list[SampleInfo]], None, tuple[None, Batch | None]]:
        """Generate and keep the samples; the rank that owns the output tells of each group as it finishes, with its place among the
        requests. In the end it returns a copy of the samples to fall back on, if the recipe wants one, for the object store.
        forget: calls whose samples are not needed any more. `pause`, `resume` and `abort` may be said beside it."""
        self._progress.begin()
        began = time.perf_counter()
        self.samples.forget(forget)
        groups = self.backend.stream(requests, sampling)
        if not self._owns_output:
            for _ in groups:
                pass
            return None, None
        answered: list[list[Sample]] = [[] for _ in requests]
        words = (self.backend.pause, self.backend.resume, self.backend.abort)
        with listening(call, {verb.__name__: verb for verb in words}):
            for at, group in groups:
                answered[at] = group
                yield at, self.samples.info(requests, at, group, began)
        self.samples.put(call, requests, answered)
        return None, self.samples.of(call) if self._spare else None

    def overhear(self, told: Callable[[list[int]], None]) -> None:
        """Have `told` hear, in this process, all tokens of a sequence after each that is drawn for it: of native rollouts."""

        def heard(sequences: list[Any]) -> None:
            for one in sequences:
                told(one.response_ids)

        cast(Any, self.backend).overheard = heard

    def slice_samples(self, chosen: list[list[Place]], layers: list[list[int] | None]) -> tuple[Any, ...]:
        """Cut what this rank keeps, nothing where another of its layout owns the output: see `SampleStore.slice_for`."""
        return self.samples.slice_for(chosen if self._owns_output else [[] for _ in chosen], layers)

    # weights

    def receivers(self) -> list[bytes | None]:
        """Return who takes weights in this process, and what, packed (`WANTED`): see `Rollout.receivers`."""
        return [None if one is None else WANTED.dump(one) for one in self.backend.receivers()]

    def update_weights(self, source: WeightSource | None) -> int:
        """Take new weights: see `Rollout.update_weights`; from None, those of the engine in this process."""
        # None comes to the native one in the trainer alone.
        return self.backend.update_weights(cast(WeightSource, source))

    def fingerprints(self) -> RankFingerprints:
        """Return those of the live weights, and what cannot be read back: see `Rollout.fingerprints`."""
        prints, unreadable = self.backend.fingerprints()
        return self._indexer.tell(prints, unreadable=unreadable)
