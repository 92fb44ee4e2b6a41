"""One rank of a rollout in processes of its own: a back end behind the protocol, and the samples it generated last.

The controller calls these methods (`quintet.controller.replicas`). A native rollout has a rank a device, which share requests;
the engines of the others make their own workers, and have one rank here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quintet.cluster.progress import Progress
from quintet.cluster.worker import Place as RankPlace
from quintet.cluster.worker import Worker
from quintet.controller.messages import SampleInfo
from quintet.controller.sample_store import Place, SampleStore
from quintet.data.batch import Batch
from quintet.data.tokenizer import load_tokenizer
from quintet.observe.memory import memory_peaks
from quintet.recipe import schema
from quintet.recipe.rollout import placement_of
from quintet.recipe.user_family import use_family
from quintet.rollout import Part, Request, Sampling, Wanted, WeightSource
from quintet.rollout.make import make_rollout
from quintet.sync.rank_fingerprints import RankFingerprints, RankIndexer, ShardIndex


class RolloutWorker(Worker):
    """One rank. `model_dir` is a Hugging Face directory that this rank's node can read."""

    def __init__(self, place: RankPlace, recipe: schema.Recipe, model_dir: Path) -> None:
        super().__init__(place)
        self.recipe, self.model_dir = recipe, model_dir
        self.samples = SampleStore(recipe.mismatch.replay_samples_per_step)
        self._progress = Progress()
        self._indexer = RankIndexer()

    def setup(self) -> None:
        """Make the rollout; of a native one, join the process group of its ranks first."""
        recipe = self.recipe
        if recipe.rollout.backend == "native":
            super().setup()
        use_family(recipe.model.family)
        self.tokenizer = load_tokenizer(self.model_dir, recipe.model)
        self.rollout = make_rollout(
            recipe, self.model_dir, device=self.device, decode=self._text, progress=self._progress
        )

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def coords(self) -> dict[str, int]:
        """Place in the rollout's layout: tp fastest, as everywhere. Its ranks share all requests, so dp is 1."""
        if self.world_size == 1:
            return {"tp": 0, "pp": 0, "cp": 0, "dp": 0}
        pp, tp = divmod(self.rank, placement_of(self.recipe).layout.tp)
        return {"tp": tp, "pp": pp, "cp": 0, "dp": 0}

    # generation

    def generate(
        self, requests: list[Request], *, sampling: Sampling, call: str, forget: list[str]
    ) -> tuple[list[list[SampleInfo]], Batch | None]:
        """Generate and keep the samples; what came out, and a copy to fall back on, for the object store. forget: calls whose
        samples are not needed any more."""
        self._progress.begin()
        self.samples.forget(forget)
        answered = self.rollout.generate(requests, sampling)
        if not self._owns_output:
            return [], None
        made = self.samples.put(call, requests, answered)
        return made, self.samples.of(call) if self.recipe.rollout.restart else None

    def slice_samples(self, chosen: list[list[Place]]) -> tuple[Any, ...]:
        """Cut what this rank keeps: see `SampleStore.slice_for`."""
        return self.samples.slice_for(chosen)

    @property
    def _owns_output(self) -> bool:
        coords = self.coords()
        return (
            coords["tp"] == 0 and coords["pp"] == (self.world_size - 1) // placement_of(self.recipe).layout.tp
        )

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of every token but the first of each sequence."""
        return self.rollout.score(sequences)

    # weights and memory

    def receivers(self) -> list[list[Wanted] | None]:
        """Who takes weights in this process: see `Rollout.receivers`."""
        return self.rollout.receivers()

    def update_weights(self, source: WeightSource) -> None:
        """Take new weights."""
        self.rollout.update_weights(source)

    def fingerprints(self) -> RankFingerprints:
        """Of the live weights, and of what cannot be read back: see `Rollout.fingerprints`."""
        prints, unreadable = self.rollout.fingerprints()
        return self._indexer.tell(prints, unreadable=unreadable)

    def shard_index(self) -> ShardIndex:
        """What the last fingerprints are of."""
        return self._indexer.index

    def sleep(self, level: int) -> None:
        """Give memory up."""
        self.rollout.sleep(level)

    def wake(self, part: Part) -> None:
        """Take memory again."""
        self.rollout.wake(part)

    def pause(self) -> None:
        """Start nothing new until `resume`."""
        self.rollout.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self.rollout.resume()

    def counts(self) -> dict[str, float]:
        """What was counted since the last time: see `Rollout.metrics`."""
        return self.rollout.metrics()

    def memory(self) -> dict[str, float | None]:
        """Peak memory of this rank so far, and of each phase since the last time it was asked."""
        return memory_peaks() | self.peaks.take()
