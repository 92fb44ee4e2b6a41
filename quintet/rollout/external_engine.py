"""What back ends have in common whose engine is another project's, with devices and processes of its own.

Such an engine does jobs: a prompt's tokens in, tokens and their log-probs out. `ExternalEngineRollout` is the rest of a rollout: it refuses
what the engine was not made for before anything is asked of it, cuts requests into jobs, a sample each, makes samples of the
answers, and keeps account of who is asleep, held or without weights. A back end adds its engine, its words for a job, and how
weights and memory change hands.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quintet.data.text_pieces import before_stop
from quintet.errors import QuintetError, UserError
from quintet.models import read_shape
from quintet.recipe import schema
from quintet.rollout.base import Part, Request, Rollout, Sample, Sampling
from quintet.rollout.seeds import sample_seeds

if TYPE_CHECKING:
    import numpy as np

Progress = Callable[[int], None]
"""Told how many jobs of a call are done."""


@dataclass(frozen=True)
class Job:
    """One response to write, or one sequence to score: a prompt, and the sampling parameters in the engine's words. scores: whether the
    log-probs of the prompt are asked. name: no other job of the rollout has it."""

    prompt_ids: list[int]
    parameters: dict[str, Any]
    scores: bool = False
    name: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Answer:
    """What became of a job of an engine. logprobs: the policy's, one a response token; prompt_logprobs: one a prompt token but
    the first, where asked; finish: as `Sample.finish`. routes: the experts of tokens, and counts: what was counted on the way, where the
    engine tells them with its answers."""

    response_ids: list[int]
    logprobs: list[float]
    finish: str
    prompt_logprobs: list[float] = field(default_factory=list)
    routes: np.ndarray | None = None
    counts: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """The engine that does the jobs. Its methods may be called from several threads."""

    def run(self, jobs: Sequence[Job]) -> Generator[dict[int, Answer]]:
        """Run all jobs; tells those that are done or aborted together, by their places. Raises WorkerFailure when a process of the engine
        dies. Closed before its end, it gives the rest up."""
        ...

    def pause(self) -> None:
        """Pause: draw no more tokens until `resume`."""
        ...

    def resume(self) -> None: ...

    def abort(self) -> None:
        """End the jobs of all calls under way, with what they have come to."""
        ...

    def close(self) -> None:
        """Stop the engine's processes and give its memory up."""
        ...


def longest(recipe: schema.Recipe) -> int:
    """Return the most tokens of a sequence in an engine: the recipe's longest sample, and one more, which scoring it may ask for."""
    return recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens + 1


class ExternalEngineRollout(Rollout, ABC):
    """The part of the rollout protocol that does not depend on whose engine it is.

    model_dir: a Hugging Face directory, that of the engine. decode: token ids → text. progress: told how many samples of a
    call are done.
    """

    title: str
    """What errors call the engine."""

    def __init__(
        self,
        recipe: schema.Recipe,
        model_dir: Path,
        engine: Engine,
        decode: Callable[[list[int]], str],
        progress: Progress,
    ) -> None:
        self._recipe, self._engine, self._decode, self._progress = recipe.rollout, engine, decode, progress
        self._longest, self._shape = longest(recipe), read_shape(model_dir)
        self._asleep: set[Part] = set()
        self._held = self._closed = False
        self._forgot = False  # whether the weights are undefined
        self._counted: dict[str, float] = {}
        self._numbers = itertools.count()

    # what each back end says in its own words

    @abstractmethod
    def _to_write(self, request: Request, number: int, seed: int, sampling: Sampling) -> Job:
        """The job of sample `number` of a request. seed: that of this sample."""

    @abstractmethod
    def _to_score(self, ids: list[int]) -> Job:
        """The job that asks for the log-probs of a sequence's tokens, at temperature 1."""

    def _completed(self, jobs: Sequence[Job], answers: list[Answer]) -> list[Answer]:
        """Return the answers to requests' jobs with what the engine tells apart from them."""
        return answers

    def _forget(self, jobs: Sequence[Job]) -> None:
        """Drop what the engine keeps of jobs whose answers nobody waits for any more."""

    @abstractmethod
    def _routes_of(self, told: np.ndarray, tokens: int) -> np.ndarray:
        """Return `Sample.routes` of a sequence of so many tokens, of what the engine told."""

    @abstractmethod
    def _counts(self) -> dict[str, float]:
        """What the engine counted since it was made, under the names of `base.COUNTS`."""

    def _check(self, sampling: Sampling) -> None:
        """Raise UserError for a sampling that the engine cannot do."""
        if sampling.stop and not self._recipe.stop:
            raise UserError(
                f"{self.title} was made without a tokenizer, which stop strings need: give at least one in rollout.stop"
            )

    # generation

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Sample]]]:
        """Yield each request's responses as they finish: see `Rollout.stream`. Raises WorkerFailure when a process of the engine
        dies."""
        self._check(sampling)
        by_request = [self._jobs(at, request, sampling) for at, request in enumerate(requests)]
        places = [(at, number) for at, some in enumerate(by_request) for number in range(len(some))]
        came: list[dict[int, tuple[Answer, float]]] = [{} for _ in requests]
        awaited, done = dict(enumerate(by_request)), 0
        try:
            with closing(self._run([job for some in by_request for job in some])) as told:
                for together in told:
                    for job, answer in together.items():
                        at, number = places[job]
                        came[at][number] = answer, time.perf_counter()
                        done += 1
                        self._progress(done)
                    touched = dict.fromkeys(places[job][0] for job in together)
                    whole = [at for at in touched if len(came[at]) == len(by_request[at])]
                    if not whole:
                        continue
                    jobs = [job for at in whole for job in by_request[at]]
                    answers = [came[at][number] for at in whole for number in range(len(by_request[at]))]
                    completed = self._completed(jobs, [answer for answer, _ in answers])
                    parts = zip(jobs, completed, (when for _, when in answers), strict=True)
                    for at in whole:
                        made = [self._sample(*one, sampling) for one in islice(parts, len(by_request[at]))]
                        del awaited[at]
                        yield at, made
        finally:
            if given_up := [job for some in awaited.values() for job in some]:
                with suppress(Exception):  # a dead engine's second error would hide its first
                    self._forget(given_up)

    def _sample(self, job: Job, told: Answer, finished: float, sampling: Sampling) -> Sample:
        made = policy_sample(told.response_ids, told.logprobs, told.finish, sampling, self._decode)
        if self._recipe.return_routes and told.routes is not None:
            made.routes = self._routes_of(told.routes, len(job.prompt_ids) + len(told.response_ids))
        made.finished = finished
        return made

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probs (temperature 1, nothing cut) of every token but the first of each sequence, given those before it."""
        for at, ids in enumerate(sequences):
            if len(ids) >= self._longest:
                raise UserError(
                    f"sequence {at} has {len(ids)} tokens; {self.title} was made for {self._longest - 1}: raise "
                    "data.max_prompt_tokens or rollout.max_response_tokens"
                )
        jobs = [self._named(self._to_score(list(ids))) for ids in sequences if len(ids) > 1]
        done = {place: made for together in self._run(jobs) for place, made in together.items()}
        if any(one.finish == "abort" for one in done.values()):
            raise QuintetError("scoring was given up by `abort`: there are no log-probs")
        answers = (done[job] for job in range(len(jobs)))
        return [next(answers).prompt_logprobs if len(ids) > 1 else [] for ids in sequences]

    def _jobs(self, at: int, request: Request, sampling: Sampling) -> list[Job]:
        """Those of a request's samples. at: its place among the requests, for errors."""
        tokens = len(request.prompt_ids)
        if not tokens:
            raise UserError(f"prompt {at} has no tokens: a response cannot start from nothing")
        limits = request.limits(sampling)
        most = max(limits, default=0)
        if min(limits, default=1) < 1:
            raise UserError(f"prompt {at} has a response of {min(limits)} tokens: one has at least 1")
        if tokens + most > self._longest:
            raise UserError(
                f"prompt {at} has {tokens} tokens and its response may have {most}; {self.title} was made for "
                f"{self._longest} in all: raise data.max_prompt_tokens or rollout.max_response_tokens"
            )
        seeds = sample_seeds(request.seed, request.samples)
        jobs = (self._to_write(request, number, seed, sampling) for number, seed in enumerate(seeds))
        return [self._named(job) for job in jobs]

    def _named(self, job: Job) -> Job:
        return replace(job, name=f"q{next(self._numbers)}")

    def _run(self, jobs: list[Job]) -> Generator[dict[int, Answer]]:
        if self._asleep:
            raise QuintetError(
                f"the rollout's {' and '.join(sorted(self._asleep))} are asleep: wake them before it generates"
            )
        if self._forgot:
            raise QuintetError(
                "the rollout's weights are undefined: it forgot them when it slept, was made without, or the last ones did not "
                "arrive whole; it generates after update_weights"
            )
        if jobs:
            yield from self._engine.run(jobs)

    # requests under way

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

    @contextmanager
    def _weights_arriving(self) -> Iterator[None]:
        """After an error within it the weights are undefined, and nothing goes on, until the next ones have come. Raises
        QuintetError while the weights are asleep."""
        if "weights" in self._asleep:
            raise QuintetError("the rollout's weights are asleep: wake them before new ones arrive")
        held_back, self._forgot = self._forgot, True
        try:
            yield
        except BaseException:
            if not self._held:
                with suppress(Exception):  # the first error tells more
                    self._engine.pause()
            raise
        self._forgot = False
        if held_back:
            self._go_on()

    def abort(self) -> None:
        """Give up requests that are under way: their samples end with finish "abort", with the tokens they have."""
        self._engine.abort()

    def metrics(self) -> dict[str, float]:
        """Return what was counted since the last call: prefix cache tokens asked for and found; with speculation, drafts, their
        tokens, and those accepted."""
        now, before = self._counts(), self._counted
        self._counted = now
        return {name: value - before.get(name, 0.0) for name, value in now.items()}

    def close(self) -> None:
        """Stop the engine and its processes, once."""
        if not self._closed:
            self._closed = True
            self._engine.close()


def policy_sample(
    response_ids: list[int],
    policy_logprobs: list[float],
    finish: str,
    sampling: Sampling,
    decode: Callable[[list[int]], str],
) -> Sample:
    """Return the sample, with what follows from the policy's log-probs (the temperature applied, nothing cut).

    The model's own are the same at temperature 1, and where sampling is greedy; those sampled under are the same where
    nothing is cut, and 0 where sampling is greedy. What does not follow is None.

    Raises QuintetError for log-probs that are no numbers, or not one a token.
    """
    if len(policy_logprobs) != len(response_ids) or not math.isfinite(sum(policy_logprobs)):
        raise QuintetError(
            f"the rollout's engine told {len(policy_logprobs)} log-probs of {len(response_ids)} tokens, "
            f"{sum(not math.isfinite(one) for one in policy_logprobs)} of them no numbers: nothing can be trained on these"
        )
    text = before_stop(decode(response_ids), sampling.stop)
    cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    raw = policy_logprobs if sampling.temperature in (0, 1) else None
    drawn = [0.0] * len(policy_logprobs) if sampling.temperature == 0 else None if cut else policy_logprobs
    return Sample(response_ids, drawn, policy_logprobs, raw, finish, text)
