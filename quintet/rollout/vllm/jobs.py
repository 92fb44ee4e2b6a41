"""What the engines, synchronous and asynchronous, have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from quintet.errors import QuintetError
from quintet.rollout import external_engine
from quintet.rollout.external_engine import Answer, Job
from quintet.rollout.vllm.sampling import own_logprobs
from quintet.rollout.vllm.token_records import LOGPROBS, ROUTES, TokenRecords

P = ParamSpec("P")
T = TypeVar("T")


class Engine(external_engine.Engine, Protocol):
    """One vLLM engine, whichever way it is driven. Parameters of its jobs are the arguments of vLLM's SamplingParams."""

    def rpc(self, verb: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a method of `Extension` in all workers, between steps; their answers in the order of ranks."""
        ...

    def counts(self) -> dict[str, float]:
        """Return what it has counted since it was made: speculation and the prefix cache, see `compat.COUNTERS`."""
        ...

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; requests under way are read anew, with the tokens they have."""
        ...


def asked(job: Job) -> tuple[Any, Any]:
    """Return a job's prompt and its parameters in vLLM's types. These are nobody else's, and are not copied deeply."""
    # Of the modules: `vllm` itself looks each name up anew, a sixth of what a request takes.
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(**job.parameters, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
    return TokensPrompt(prompt_token_ids=job.prompt_ids), params


def answer(output: Any) -> Answer:
    """Return the answer in a finished RequestOutput of vLLM."""
    (one,) = output.outputs
    if one.finish_reason not in ("stop", "length", "abort"):
        raise QuintetError(f"vLLM ended a request with {one.finish_reason!r}: {one.stop_reason}")
    ids = list(one.token_ids)
    return Answer(
        ids,
        own_logprobs(one.logprobs)[: len(ids)],  # of all that a step accepted: see compat.stop_within_drafts
        one.finish_reason,
        own_logprobs(output.prompt_logprobs),
    )


def completed(made: Answer, records: TokenRecords, prompt: int) -> Answer:
    """Return an answer with what workers wrote down of its tokens. prompt: tokens of its prompt. What was given up before it was
    read to its last token but one has no routes."""
    tokens = len(made.response_ids)
    logprobs = (
        records[LOGPROBS][prompt - 1 : prompt - 1 + tokens].tolist() if LOGPROBS in records else made.logprobs
    )
    return replace(made, logprobs=logprobs, routes=records.get(ROUTES) if made.finish != "abort" else None)
