"""SGLang behind the rollout protocol: one engine, of one or more devices, in the process that makes it.

It follows sglang 0.5.17. What needs a GPU `make test-gpu PART=sglang` tests there, on one device: never run are tensor and expert parallel,
routes, stop strings and quintet's noise. Other tests run what needs no SGLang, with a stand-in of its engine.

A sample is a request of its own, with its own seed, which SGLang reads in its deterministic mode alone: it is on unless
rollout.sglang.enable_deterministic_inference is false. Weights cannot be read back by their Hugging Face names: a log-prob
probe stands for the fingerprints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from quintet.errors import QuintetError
from quintet.recipe import schema
from quintet.recipe.rollout import placement_of
from quintet.rollout.base import (
    Fingerprints,
    Part,
    Request,
    Sampling,
    Wanted,
    WeightSource,
    parts_of,
)
from quintet.rollout.external_engine import Answer, ExternalEngineRollout, Job, Progress
from quintet.rollout.sglang import compat
from quintet.rollout.sglang.buckets import in_buckets
from quintet.rollout.sglang.engine import SglangEngine
from quintet.rollout.sglang.sampling import COUNTS, parameters, routes_of
from quintet.rollout.sglang.settings import engine_arguments


class SglangRollout(ExternalEngineRollout):
    """SGLang on the devices of one rollout: rollout.layout.tp of them.

    model_dir: a Hugging Face directory, whose weights are good until the first sync. device: cuda. decode: token ids →
    text. progress: told how many samples of a call are done. Raises UserError for an SGLang that is missing or not
    supported, and for options that it does not know.
    """

    title = "SGLang"
    _engine: SglangEngine

    def __init__(
        self,
        recipe: schema.Recipe,
        model_dir: Path,
        *,
        device: str,
        decode: Callable[[list[int]], str],
        progress: Progress = lambda done: None,
    ) -> None:
        compat.prepare(device)
        self._devices = placement_of(recipe).devices_per_copy
        free = compat.free_share(self._devices)
        engine = SglangEngine(engine_arguments(recipe, model_dir, free))
        super().__init__(recipe, model_dir, engine, decode, progress)
        self._totals = dict.fromkeys(COUNTS.values(), 0.0)
        self._taken: set[str] = set()

    # jobs

    def _to_write(self, request: Request, number: int, seed: int, sampling: Sampling) -> Job:
        return Job(list(request.prompt_ids), parameters(sampling, request, number, seed))

    def _to_score(self, ids: list[int]) -> Job:
        return Job(ids, {"temperature": 1.0, "max_new_tokens": 0}, scores=True)

    def _run(self, jobs: list[Job]) -> Generator[dict[int, Answer]]:
        for together in super()._run(jobs):
            for name, count in chain.from_iterable(made.counts.items() for made in together.values()):
                self._totals[name] += count
            yield together

    def _routes_of(self, told: np.ndarray, tokens: int) -> np.ndarray:
        return routes_of(told, self._shape, tokens)

    def _counts(self) -> dict[str, float]:
        return dict(self._totals)

    # weights and memory

    def receivers(self) -> list[list[Wanted] | None]:
        """Return one receiver, which takes whole tensors: it hands them to all of SGLang's workers, whose own loading cuts out
        its part."""
        return [None]

    def update_weights(self, source: WeightSource) -> int:
        """Take new weights. The prefix cache is emptied; requests that are held go on with the new weights. After an error
        the weights are undefined, and nothing goes on, until the next ones have come."""
        device = torch.device("cuda", torch.cuda.current_device())
        with self._weights_arriving(), contextlib.closing(source.batches(0)) as batches:  # type: ignore[type-var]
            self._engine.forget_prefixes()
            self._taken = set()  # what does not come this time must be missed
            for bucket in in_buckets(chain.from_iterable(batches), self._recipe.bucket_mib, device):
                torch.cuda.current_stream(device).synchronize()
                self._engine.load(bucket.flat, bucket.entries)
                self._taken.update(name for name, *_ in bucket.entries)
                del bucket  # or its memory would stay until there is another
            self._engine.forget_prefixes()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()  # for the KV cache, and who trains here
        return 0

    def fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """Return no fingerprints: SGLang joins tensors as it loads them, and tells checksums of the joined ones alone."""
        return {}, sorted(self._taken)

    def sleep(self, level: int) -> int:
        """Give up the KV cache, at levels 1 and 2 the weights too; 1 keeps a copy on the host, 2 forgets them. Which of these
        is fixed by rollout.sleep_level: with 1 a copy is kept at level 2, too."""
        parts = parts_of(level) - self._asleep
        if not parts:
            return 0
        if level == 1 and self._recipe.sleep_level != 1:
            raise QuintetError(
                "SGLang was made with rollout.sleep_level=2, and keeps no copy of weights that sleep"
            )
        used = compat.used_bytes(self._devices)
        self._engine.release(sorted(parts))
        self._asleep |= parts
        self._forgot = self._forgot or ("weights" in parts and self._recipe.sleep_level != 1)
        return max(used - compat.used_bytes(self._devices), 0)

    def wake(self, part: Part) -> int:
        """Take memory again. After level 2 the weights are undefined until `update_weights`."""
        if part not in self._asleep:
            return 0
        used = compat.used_bytes(self._devices)
        self._engine.restore([part])
        came = max(compat.used_bytes(self._devices) - used, 0)
        self._asleep.discard(part)
        self._go_on()
        return came
