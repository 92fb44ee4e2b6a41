"""vLLM behind the rollout protocol: one engine, of one or more devices, in the process that makes it.

A sample is a request of its own, with its own seed, so that it does not depend on what is generated beside it; the samples
of a prompt find its keys and values in the prefix cache. With speculation the noise is drawn a draft at a time, and a
sample depends on the drafts' length as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

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
from quintet.rollout.vllm import compat, runners
from quintet.rollout.vllm.extension import Extension
from quintet.rollout.vllm.jobs import Engine, completed
from quintet.rollout.vllm.offline import OfflineEngine
from quintet.rollout.vllm.routes import of_all_layers, routes_of
from quintet.rollout.vllm.sampling import check, mode_of, parameters
from quintet.rollout.vllm.server import ServerEngine
from quintet.rollout.vllm.settings import draft_length, engine_arguments
from quintet.rollout.vllm.token_records import ASKS
from quintet.rollout.vllm.weights import check as check_taken
from quintet.rollout.vllm.weights import combine


class VllmRollout(ExternalEngineRollout):
    """vLLM on the devices of one rollout: rollout.layout.tp × pp of them.

    model_dir: a Hugging Face directory, whose weights are good until the first sync, but for those in 8 bits, which are not read;
    none are with `empty`, and it generates from the first sync on. device: cpu or cuda. decode: token ids → text. progress: told how many
    samples of a call are done. Raises UserError for a vLLM that is missing or not supported, and for options that it does not know or take.
    """

    title = "vLLM"
    _engine: Engine

    def __init__(
        self,
        recipe: schema.Recipe,
        model_dir: Path,
        *,
        device: str,
        decode: Callable[[list[int]], str],
        progress: Progress = lambda done: None,
        empty: bool = False,
    ) -> None:
        compat.prepare(device)
        drafted = draft_length(recipe, model_dir, device)
        if device == "cuda":
            print(runners.choose_runner(recipe), flush=True)
        self._mode = mode_of(recipe.rollout)
        arguments = engine_arguments(recipe, model_dir, device)
        if empty:
            arguments.setdefault("load_format", "dummy")
        if recipe.rollout.draft_tokens == "auto":
            print(f"vLLM: {drafted.why}", flush=True)
        make = ServerEngine if recipe.rollout.mode == "server" else OfflineEngine
        with compat.starting():
            engine: Engine = make(arguments)
        super().__init__(recipe, model_dir, engine, decode, progress)
        self._tp = int(arguments["tensor_parallel_size"])
        self._tells_logprobs = "worker_cls" not in arguments
        self._stores = recipe.rollout.return_routes or not self._tells_logprobs
        if self._stores and self._tells_logprobs:
            self._engine.rpc(Extension.listen_for_routes)
        if arguments.get("speculative_config"):
            compat.stop_within_drafts()
            self._engine.rpc(Extension.begin_to_draft)
        self._alone = placement_of(recipe).adapters_separate
        # vLLM makes weights up without being asked to by the recipe: the directory's are others, or come by a sync as well.
        self._forgot = arguments.get("load_format") != recipe.rollout.vllm.get("load_format")
        if self._alone:
            check_taken(self._engine.rpc(Extension.read_frozen))

    # jobs

    def _check(self, sampling: Sampling) -> None:
        super()._check(sampling)
        check(sampling, self._mode)

    def _to_write(self, request: Request, number: int, seed: int, sampling: Sampling) -> Job:
        asked = parameters(sampling, request, number, seed)
        if not self._tells_logprobs:
            asked |= {"logprobs": None, "flat_logprobs": False}
        if self._stores:
            asked["extra_args"] = ASKS
        return Job(list(request.prompt_ids), asked)

    def _to_score(self, ids: list[int]) -> Job:
        asked = {
            "temperature": 0.0,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
        }
        return Job(ids, asked, scores=True)

    def _completed(self, jobs: Sequence[Job], answers: list[Answer]) -> list[Answer]:
        if not self._stores:
            return answers
        found = self._engine.rpc(Extension.take_records, [job.name for job in jobs])
        records = of_all_layers(found, self._tp)
        return [
            completed(made, records.get(job.name, {}), len(job.prompt_ids))
            for job, made in zip(jobs, answers, strict=True)
        ]

    def _forget(self, jobs: Sequence[Job]) -> None:
        if self._stores:
            self._engine.rpc(Extension.forget_records, [job.name for job in jobs])

    def _routes_of(self, told: np.ndarray, tokens: int) -> np.ndarray:
        return routes_of(told, self._shape, tokens)

    def _counts(self) -> dict[str, float]:
        return self._engine.counts()

    # weights and memory

    def receivers(self) -> list[list[Wanted] | None]:
        """Return one receiver a device: whole tensors, out of which vLLM's own loading cuts its part; or, once that has shown
        which parts those are, the parts. Quantised tensors travel whole, with their scales."""
        wanted = self._engine.rpc(Extension.wanted_weights)
        return wanted if self._recipe.quantization is None else [None] * len(wanted)

    def update_weights(self, source: WeightSource) -> int:
        """Take new weights. The prefix cache is emptied; requests that are held go on with the new weights: they keep
        the tokens they have, with the log-probs that the old ones gave these. Raises
        SyncMismatch naming tensors that did not come, or that vLLM's model has no place for; after any error the weights are
        undefined, and nothing goes on, until the next ones have come."""
        with self._weights_arriving():
            check_taken(self._engine.rpc(Extension.take_weights, source.words()))
            self._forget_prefixes()
        return 0

    def fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """Return fingerprints of the workers' live weights, and the names of tensors that vLLM keeps in another form."""
        return combine(self._engine.rpc(Extension.read_fingerprints))

    def sleep(self, level: int) -> int:
        """Give up the KV cache, and at level 1, which keeps a copy on the host, and 2, which forgets them, the weights; frozen
        ones, beside which adapters come alone, are kept.
        Requests under way are held, and go on when all is awake again. On CPU the weights stay (see `extension`)."""
        if self._alone:
            level = min(level, 1)  # frozen weights do not come again
        if parts_of(level) <= self._asleep:
            return 0
        self._engine.pause()
        if "kv_cache" in self._asleep:  # vLLM gives the weights up together with it
            self._engine.rpc(Extension.wake_part, "kv_cache")
        self._forget_prefixes()
        deeper = "weights" not in self._asleep
        left = sum(self._engine.rpc(Extension.fall_asleep, level if deeper else 0))
        self._asleep |= parts_of(level)
        self._forgot = self._forgot or (deeper and level == 2)
        return left

    def _forget_prefixes(self) -> None:
        """Empty the prefix cache; requests that are held are read anew, and keep the log-probs and routes that they have."""
        if self._stores:
            self._engine.rpc(Extension.keep_records)
        self._engine.forget_prefixes()

    def wake(self, part: Part) -> int:
        """Take memory again. After level 2 the weights are undefined until `update_weights`."""
        if part not in self._asleep:
            return 0
        came = sum(self._engine.rpc(Extension.wake_part, part))
        self._asleep.discard(part)
        self._go_on()
        return came
