"""SGLang behind the rollout protocol: one engine, of one or more devices, in the process that makes it.

Untested on GPUs. It follows the source of sglang 0.5.17; tests run what needs no SGLang: parameters, answers, options,
versions, buckets, and the order of pauses, aborts and syncs against a stand-in of its engine. Never run: SGLang itself,
and with it speed, memory after sleep, weights arriving in its models, and the numbers it tells.

A sample is a request of its own, with its own seed, which SGLang reads in its deterministic mode alone: it is on unless
rollout.sglang.enable_deterministic_inference is false. Weights cannot be read back by their Hugging Face names: a log-prob
probe stands for the fingerprints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from quintet.errors import QuintetError, UserError
from quintet.models import read_shape
from quintet.recipe import schema
from quintet.recipe.sglang import refusals
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
from quintet.rollout.sglang import compat
from quintet.rollout.sglang.buckets import in_buckets
from quintet.rollout.sglang.engine import Progress, SglangEngine
from quintet.rollout.sglang.sampling import COUNTS, Answer, Job, parameters, routes_of
from quintet.rollout.sglang.settings import engine_arguments, longest


class SglangRollout:
    """SGLang on the devices of one rollout: rollout.layout.tp of them. Untested on GPUs: see above.

    model_dir: a Hugging Face directory, whose weights are good until the first sync. device: cuda. decode: token ids →
    text. progress: told how many samples of a call are done. Raises UserError for an SGLang that is missing or not
    supported, and for what it cannot do or does not know.
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
        for _, sentence in refusals(recipe.rollout):
            raise UserError(sentence)
        compat.prepare(device)
        self._recipe, self._decode, self._progress = recipe.rollout, decode, progress
        self._longest, self._shape = longest(recipe), read_shape(model_dir)
        self._engine = SglangEngine(engine_arguments(recipe, model_dir))
        self._asleep: set[Part] = set()
        self._held = self._forgot = False
        self._counted = dict.fromkeys(COUNTS.values(), 0.0)
        self._taken: set[str] = set()

    # generation

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Sample]]:
        """Responses of each request, in order. Raises WorkerFailure when a process of the engine dies."""
        if sampling.stop and not self._recipe.stop:
            raise UserError(
                "SGLang was made without a tokenizer, which stop strings need: give at least one in rollout.stop"
            )
        jobs = [
            self._job(at, request, number, sampling)
            for at, request in enumerate(requests)
            for number in range(request.samples)
        ]
        answers = iter(self._run(jobs))
        return [[self._sample(r, next(answers), sampling) for _ in range(r.samples)] for r in requests]

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-probs (temperature 1, nothing cut) of every token but the first of each sequence, given those before it."""
        for at, ids in enumerate(sequences):
            if len(ids) >= self._longest:
                raise UserError(
                    f"sequence {at} has {len(ids)} tokens; SGLang was made for {self._longest - 1}: raise "
                    "data.max_prompt_tokens or rollout.max_response_tokens"
                )
        asked = {"temperature": 1.0, "max_new_tokens": 0}
        jobs = [Job(list(ids), asked, start=0) for ids in sequences if len(ids) > 1]
        answers = iter(self._run(jobs, tell=False))
        return [next(answers).prompt_logprobs if len(ids) > 1 else [] for ids in sequences]

    def _run(self, jobs: list[Job], tell: bool = True) -> list[Answer]:
        if self._asleep:
            raise QuintetError(
                f"the rollout's {' and '.join(sorted(self._asleep))} are asleep: wake them before it generates"
            )
        if self._forgot:
            raise QuintetError(
                "the rollout's weights are undefined: it forgot them when it slept, or the last ones did not arrive whole; it "
                "generates after update_weights"
            )
        answers = self._engine.run(jobs, self._progress if tell else lambda done: None) if jobs else []
        for made in answers:
            for name, count in made.counts.items():
                self._counted[name] += count
        return answers

    def _job(self, at: int, request: Request, number: int, sampling: Sampling) -> Job:
        if not request.prompt_ids:
            raise UserError(f"prompt {at} has no tokens: a response cannot start from nothing")
        asked = parameters(sampling, request, number, sample_seed(request.seed, number))
        if len(request.prompt_ids) + asked["max_new_tokens"] > self._longest:
            raise UserError(
                f"prompt {at} has {len(request.prompt_ids)} tokens and its response may have {asked['max_new_tokens']}; SGLang "
                f"was made for {self._longest} in all: raise data.max_prompt_tokens or rollout.max_response_tokens"
            )
        return Job(
            list(request.prompt_ids),
            asked,
            ends=frozenset(asked["stop_token_ids"]),
            routes=self._recipe.return_routes,
        )

    def _sample(self, request: Request, made: Answer, sampling: Sampling) -> Sample:
        sample = policy_sample(made.response_ids, made.logprobs, made.finish, sampling, self._decode)
        if made.routes is not None:
            tokens = len(request.prompt_ids) + len(made.response_ids)
            sample.routes = routes_of(made.routes, self._shape, tokens)
        return sample

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
        since, self._counted = self._counted, dict.fromkeys(COUNTS.values(), 0.0)
        return since

    # weights and memory

    def receivers(self) -> list[list[Wanted] | None]:
        """One, which takes whole tensors: it hands them to all of SGLang's workers, whose own loading cuts out its part."""
        return [None]

    def update_weights(self, source: WeightSource) -> None:
        """Take new weights. The prefix cache is emptied; requests that are held go on with the new weights. After an error
        the weights are undefined, and nothing goes on, until the next ones have come."""
        if "weights" in self._asleep:
            raise QuintetError("the rollout's weights are asleep: wake them before new ones arrive")
        self._engine.forget_prefixes()
        self._taken = set()  # what does not come this time must be missed
        held_back, self._forgot = self._forgot, True
        device = torch.device("cuda", torch.cuda.current_device())
        with contextlib.closing(source.pieces(0)) as pieces:  # type: ignore[type-var]
            for bucket in in_buckets(pieces, self._recipe.bucket_mib, device):
                torch.cuda.current_stream(device).synchronize()
                self._engine.load(bucket.flat, bucket.entries)
                self._taken.update(name for name, *_ in bucket.entries)
        self._engine.forget_prefixes()
        self._forgot = False
        if held_back:
            self._go_on()

    def fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """None: SGLang joins tensors as it loads them, and tells checksums of the joined ones alone."""
        return {}, sorted(self._taken)

    def sleep(self, level: int) -> None:
        """Give up the KV cache, at levels 1 and 2 the weights too; 1 keeps a copy on the host, 2 forgets them. Which of these
        is fixed by rollout.sleep_level: with 1 a copy is kept at level 2, too."""
        parts = parts_of(level) - self._asleep
        if not parts:
            return
        if level == 1 and self._recipe.sleep_level != 1:
            raise QuintetError(
                "SGLang was made with rollout.sleep_level=2, and keeps no copy of weights that sleep"
            )
        self._engine.release(sorted(parts))
        self._asleep |= parts
        self._forgot = self._forgot or ("weights" in parts and self._recipe.sleep_level == 2)

    def wake(self, part: Part) -> None:
        """Take memory again. After level 2 the weights are undefined until `update_weights`."""
        if part in self._asleep:
            self._engine.restore([part])
            self._asleep.discard(part)
            self._go_on()

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._engine.close()
