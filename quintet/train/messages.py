"""What controller and ranks say to each other. Imports no megatron, so the controller starts without it."""

from __future__ import annotations

from dataclasses import dataclass

from quintet.algorithms.aggregation import Tally


@dataclass(frozen=True)
class Generated:
    """What the controller learns of a generated sample; its tokens stay where they are."""

    tokens: int
    """Prompt and response."""
    response_tokens: int
    finish: str
    text: str
    logprob: float | None
    """Of the response under the sampling distribution: the sum over its tokens. None where the rollout cannot tell."""
    raw_logprob: float | None
    """The same under the model's own distribution (temperature 1, nothing cut)."""


@dataclass
class Assignment:
    """What one dp rank does with its part of a mini-batch.

    microbatches: positions of the samples in the order in which they arrive. tokens, samples: trained tokens and
    samples of the whole mini-batch over all ranks.
    """

    microbatches: list[list[int]]
    tokens: int
    samples: int


@dataclass
class Updated:
    """What one optimizer step came to on one dp rank: its share of the loss, its tally; norm and rate are everyone's."""

    loss: float
    tally: Tally
    grad_norm: float
    lr: float
