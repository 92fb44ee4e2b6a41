"""The rollout protocol: what a generation back end is asked and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quintet.recipe import schema


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The sampling distribution is softmax(logits / temperature), cut by top-k, then top-p,
    then min-p, and renormalised. temperature 0 takes the largest logit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_response_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    """Go on past end-of-sequence to the full length (for benchmarks)."""

    @staticmethod
    def of(recipe: schema.Rollout, end_ids: Sequence[int], *, greedy: bool = False) -> Sampling:
        """The sampling of a recipe; `end_ids` are the tokenizer's end-of-sequence ids."""
        return Sampling(
            temperature=0.0 if greedy else recipe.temperature,
            top_p=recipe.top_p,
            top_k=recipe.top_k,
            min_p=recipe.min_p,
            max_response_tokens=recipe.max_response_tokens,
            stop=tuple(recipe.stop),
            stop_token_ids=tuple({*recipe.stop_token_ids, *end_ids}),
        )


@dataclass(frozen=True)
class Request:
    """One prompt, `samples` responses. `seed` keys the noise: sample k of a seed is the same whatever else is in
    the batch. `max_response_tokens` may limit each sample on its own."""

    prompt_ids: list[int]
    samples: int = 1
    seed: int = 0
    max_response_tokens: tuple[int, ...] | None = None


@dataclass
class Sample:
    """One response. Log-probs are of the sampled tokens: `logprobs` under the sampling distribution,
    `policy_logprobs` with the temperature but nothing cut (what the trainer computes again), `raw_logprobs` under the
    model's own (temperature 1, nothing cut). `finish` is "stop" or "length"."""

    response_ids: list[int]
    logprobs: list[float]
    policy_logprobs: list[float]
    raw_logprobs: list[float]
    finish: str
    text: str = field(default="")


class Rollout(Protocol):
    """A generation back end; one rank of it."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Sample]]:
        """Responses of each request, in order. Ranks that share requests (tp, pp) all get the result."""
        ...

    def update_weights(self) -> None:
        """Take over the engine's present weights."""
        ...
