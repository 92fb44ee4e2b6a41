"""What the engines, synchronous and asynchronous, are handed and hand back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quintet.errors import QuintetError
from quintet.rollout.vllm.sampling import told

if TYPE_CHECKING:
    import numpy as np

Progress = Callable[[int], None]
"""Told how many jobs of a call are done."""


@dataclass(frozen=True)
class Job:
    """One response to write, or one sequence to score: a prompt and the arguments of vLLM's SamplingParams."""

    prompt_ids: list[int]
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What became of a job. name: of the request it was. logprobs: one a response token; prompt_logprobs: one a prompt token
    but the first, where asked. routes: the experts of tokens, where vLLM itself tells them."""

    name: str
    response_ids: list[int]
    logprobs: list[float]
    finish: str
    prompt_logprobs: list[float] = field(default_factory=list)
    routes: np.ndarray | None = None


class Engine(Protocol):
    """One vLLM engine, whichever way it is driven. Its methods may be called from several threads."""

    def run(self, jobs: Sequence[Job], progress: Progress) -> list[Answer]:
        """Do all jobs; returns when each is done or aborted."""
        ...

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all workers, between steps; their answers in the order of ranks."""
        ...

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; requests under way begin anew."""
        ...

    def pause(self) -> None:
        """No more steps until `resume`."""
        ...

    def resume(self) -> None: ...

    def abort(self) -> None:
        """End the jobs of all calls under way, with what they have come to."""
        ...

    def close(self) -> None:
        """Stop the engine's processes and give its memory up."""
        ...


def answer(output: Any) -> Answer:
    """The answer in a finished RequestOutput of vLLM."""
    (one,) = output.outputs
    if one.finish_reason not in ("stop", "length", "abort"):
        raise QuintetError(f"vLLM ended a request with {one.finish_reason!r}: {one.stop_reason}")
    return Answer(
        output.request_id,
        list(one.token_ids),
        told(one.logprobs),
        one.finish_reason,
        told(output.prompt_logprobs),
        one.routed_experts,
    )
