"""vLLM behind the rollout protocol: one engine, of one or more devices, in the process that makes it.

A sample is a request of its own, with its own seed, so that it does not depend on what is generated beside it; the samples
of a prompt find its keys and values in the prefix cache. With speculation the noise is drawn a draft at a time, and a
sample depends on the drafts' length as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from quintet.errors import QuintetError, UserError
from quintet.models import read_shape
from quintet.recipe import schema
from quintet.rollout.base import (
    Fingerprints,
    Part,
    Request,
    Sample,
    Sampling,
    Wanted,
    WeightSource,
    parts_of,
)
from quintet.rollout.policy_sample import policy_sample
from quintet.rollout.seeds import sample_seed
from quintet.rollout.vllm import compat
from quintet.rollout.vllm.jobs import Answer, Engine, Job, Progress
from quintet.rollout.vllm.offline import OfflineEngine
from quintet.rollout.vllm.routes import heard, routes_of
from quintet.rollout.vllm.sampling import check, mode_of, parameters
from quintet.rollout.vllm.server import ServerEngine
from quintet.rollout.vllm.settings import engine_arguments, longest
from quintet.rollout.vllm.weights import check as check_taken
from quintet.rollout.vllm.weights import combine

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
}
"""vLLM's counters, and what `VllmRollout.metrics` calls them."""


class VllmRollout:
    """vLLM on the devices of one rollout: rollout.layout.tp × pp of them.

    model_dir: a Hugging Face directory, whose weights are good until the first sync. device: cpu or cuda. decode: token
    ids → text. progress: told how many samples of a call are done. Raises UserError for a vLLM that is missing or not
    supported, and for options it does not know.
    """

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
        self._recipe, self._decode, self._progress = recipe.rollout, decode, progress
        self._mode, self._longest = mode_of(recipe.rollout), longest(recipe)
        arguments = engine_arguments(recipe, model_dir, device)
        self._engine: Engine
        self._engine = (
            ServerEngine(arguments) if recipe.rollout.mode == "server" else OfflineEngine(arguments)
        )
        self._shape, self._tp = read_shape(model_dir), int(arguments["tensor_parallel_size"])
        self._hears = recipe.rollout.return_routes and device == "cpu"
        if self._hears:
            self._engine.rpc("listen_for_routes")
        self._asleep: set[Part] = set()
        self._held = self._closed = False
        # Whether the weights are undefined: with quantization the directory holds others.
        self._forgot = recipe.rollout.quantization is not None
        self._counted = dict.fromkeys(COUNTERS.values(), 0.0)

    # generation

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Sample]]:
        """Responses of each request, in order. Raises WorkerFailure when a process of the engine dies."""
        check(sampling, self._mode)
        if sampling.stop and not self._recipe.stop:
            raise UserError(
                "vLLM was made without a tokenizer, which stop strings need: give at least one in rollout.stop"
            )
        jobs = [
            self._job(at, request, number, sampling)
            for at, request in enumerate(requests)
            for number in range(request.samples)
        ]
        answers = self._run(jobs)
        made = [policy_sample(a.response_ids, a.logprobs, a.finish, sampling, self._decode) for a in answers]
        if self._recipe.return_routes:
            self._add_routes(made, answers, [len(job.prompt_ids) for job in jobs])
        samples = iter(made)
        return [[next(samples) for _ in range(r.samples)] for r in requests]

    def _add_routes(self, samples: list[Sample], answers: list[Answer], prompts: list[int]) -> None:
        """What was given up before it was read to its last token but one has no routes."""
        heard_here = heard(self._engine.rpc("take_routes"), self._tp) if self._hears else {}
        by_name = {compat.asked_as(name): routes for name, routes in heard_here.items()}
        for sample, made, prompt in zip(samples, answers, prompts, strict=True):
            told = by_name.get(made.name, made.routes)
            if told is not None and sample.finish != "abort":
                sample.routes = routes_of(told, self._shape, prompt + len(sample.response_ids))

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-probs (temperature 1, nothing cut) of every token but the first of each sequence, given those before it."""
        for at, ids in enumerate(sequences):
            if len(ids) >= self._longest:
                raise UserError(
                    f"sequence {at} has {len(ids)} tokens; vLLM was made for {self._longest - 1}: raise "
                    "data.max_prompt_tokens or rollout.max_response_tokens"
                )
        asked = {
            "temperature": 0.0,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
        }
        jobs = [Job(list(ids), asked) for ids in sequences if len(ids) > 1]
        done = self._run(jobs, tell=False)
        if any(one.finish == "abort" for one in done):
            raise QuintetError("scoring was given up by `abort`: there are no log-probs")
        answers = iter(done)
        return [next(answers).prompt_logprobs if len(ids) > 1 else [] for ids in sequences]

    def _run(self, jobs: list[Job], tell: bool = True) -> list[Answer]:
        if self._asleep:
            raise QuintetError(
                f"the rollout's {' and '.join(sorted(self._asleep))} are asleep: wake them before it generates"
            )
        if self._forgot:
            raise QuintetError(
                "the rollout's weights are undefined: it forgot them when it slept, was made without, or the last ones did not "
                "arrive whole; it generates after update_weights"
            )
        return self._engine.run(jobs, self._progress if tell else lambda done: None) if jobs else []

    def _job(self, at: int, request: Request, number: int, sampling: Sampling) -> Job:
        if not request.prompt_ids:
            raise UserError(f"prompt {at} has no tokens: a response cannot start from nothing")
        asked = parameters(sampling, request, number, sample_seed(request.seed, number))
        if len(request.prompt_ids) + asked["max_tokens"] > self._longest:
            raise UserError(
                f"prompt {at} has {len(request.prompt_ids)} tokens and its response may have {asked['max_tokens']}; vLLM was "
                f"made for {self._longest} in all: raise data.max_prompt_tokens or rollout.max_response_tokens"
            )
        return Job(list(request.prompt_ids), asked)

    def pause(self) -> None:
        """Hold requests that are under way, and start no others, until `resume`."""
        self._held = True
        self._engine.pause()

    def resume(self) -> None:
        """Go on after `pause`; asleep or without weights, once all is there."""
        self._held = False
        self._go_on()

    def _go_on(self) -> None:
        if not (self._held or self._asleep or self._forgot):
            self._engine.resume()

    def abort(self) -> None:
        """Give up requests that are under way: their samples end with finish "abort", with the tokens they have."""
        self._engine.abort()

    def metrics(self) -> dict[str, float]:
        """What was counted since the last call: prefix cache tokens asked for and found; with speculation, drafts, their
        tokens, and those accepted."""
        now = {COUNTERS[name]: value for name, value in compat.counters(list(COUNTERS)).items()}
        since = {name: value - self._counted[name] for name, value in now.items()}
        self._counted = now
        return since

    # weights and memory

    def receivers(self) -> list[list[Wanted] | None]:
        """One a device: whole tensors, out of which vLLM's own loading cuts its part; or, once that has shown which parts
        those are and vLLM keeps them as they are, the parts."""
        wanted: list[list[Wanted] | None] = self._engine.rpc("wanted_weights")
        return wanted

    def update_weights(self, source: WeightSource) -> None:
        """Take new weights. The prefix cache is emptied; requests that are held begin anew with the new weights. Raises
        SyncMismatch naming tensors that did not come, or that vLLM's model has no place for; after any error the weights are
        undefined, and nothing goes on, until the next ones have come."""
        held_back, self._forgot = self._forgot, True
        check_taken(self._engine.rpc("take_weights", source))
        self._engine.forget_prefixes()
        self._forgot = False
        if held_back:
            self._go_on()

    def fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """Fingerprints of the workers' live weights, and the names of tensors that vLLM keeps in another form."""
        return combine(self._engine.rpc("read_fingerprints"))

    def sleep(self, level: int) -> None:
        """Give up the KV cache, and at level 1, which keeps a copy on the host, and 2, which forgets them, the weights.
        Requests under way are held, and begin anew when all is awake again. On CPU the weights stay (see `extension`)."""
        if parts_of(level) <= self._asleep:
            return
        self._engine.pause()
        if "kv_cache" in self._asleep:  # vLLM gives the weights up together with it
            self._engine.rpc("wake_part", "kv_cache")
        self._engine.forget_prefixes()
        deeper = "weights" not in self._asleep
        self._engine.rpc("fall_asleep", level if deeper else 0)
        self._asleep |= parts_of(level)
        self._forgot = self._forgot or (deeper and level == 2)

    def wake(self, part: Part) -> None:
        """Take memory again. After level 2 the weights are undefined until `update_weights`."""
        if part not in self._asleep:
            return
        self._engine.rpc("wake_part", part)
        self._asleep.discard(part)
        self._go_on()

    def close(self) -> None:
        """Stop the engine and its processes, once."""
        if not self._closed:
            self._closed = True
            self._engine.close()
