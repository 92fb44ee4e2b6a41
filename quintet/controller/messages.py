"""What controller and ranks say to each other. Imports no megatron, so the controller starts without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from quintet.algorithms.aggregation import Tally
from quintet.algorithms.expert_load import ExpertLoad
from quintet.packing.plan import Cell

if TYPE_CHECKING:
    import numpy as np

    from quintet.recipe import schema


RouteUse: TypeAlias = Literal["record", "recorded", "rollout"]
"""What a pass over a batch does with routes: record those that tokens choose, or replay these, or what the rollout told. A pass that
is told nothing does nothing with them, whatever the ranks hold."""

PartedRoutes: TypeAlias = dict[int, tuple[int, int]]
"""By layer, from 0: how many tokens' own choice was another than was prescribed to them, and to how many one was."""


def joined(one: PartedRoutes, other: PartedRoutes) -> PartedRoutes:
    """Return the sums of both, in order of layers."""
    counts = {layer: (one.get(layer, (0, 0)), other.get(layer, (0, 0))) for layer in {*one, *other}}
    return {layer: (a[0] + b[0], a[1] + b[1]) for layer, (a, b) in sorted(counts.items())}


@dataclass(frozen=True)
class Decisions:
    """What a recipe leaves open, and the ranks have decided."""

    engine: schema.Engine
    """With its layers and kernels."""
    shares: dict[str, float]
    """Of each kind of training state, that leaves the device while others need it."""
    sleep_level: int
    """Of the rollout."""
    why: str | None
    """These two, in sentences."""


@dataclass(frozen=True)
class ReplayTokens:
    """A generated sample with its tokens, of the few that are written for replay."""

    ids: list[int]
    """Prompt and response."""
    prompt_tokens: int
    logprobs: list[float]
    """Of the response's tokens, as the trainer is to compute them again."""
    routes: np.ndarray | None = None
    """As in `quintet.rollout.base.Sample`."""


@dataclass(frozen=True)
class TrainedTokens:
    """The same sample where it is trained on: what arrived there, and the trainer's own log-probs before the first update."""

    ids: list[int]
    prompt_tokens: int
    rollout_logprobs: list[float]
    old_logprobs: list[float]


@dataclass(frozen=True)
class SampleInfo:
    """What the controller learns of a generated sample; its tokens stay where they are, but for a few samples'."""

    tokens: int
    """Prompt and response."""
    response_tokens: int
    finish: str
    text: str
    logprob: float | None
    """Of the response under the sampling distribution: the sum over its tokens. None where the rollout cannot tell."""
    raw_logprob: float | None
    """The same under the model's own distribution (temperature 1, nothing cut)."""
    kept: ReplayTokens | None = None
    seconds: float = field(default=0.0, compare=False)
    """From the beginning of the call, on the rank that tells, until its last token was there."""


@dataclass
class Assignment:
    """What the ranks of one dp rank do with their part of a mini-batch.

    rounds: their cells (`Plan.local`), samples as positions in the order in which they arrive. numbers: of these samples in the
    batch. targets, samples: tokens that each head is trained on, and samples, of the whole mini-batch over all ranks. replayed:
    which of the samples are told once they are trained on, the number in the batch and the position here.
    """

    rounds: list[list[Cell]]
    numbers: list[int]
    targets: list[int]
    samples: int
    replayed: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MiniBatchTold:
    """What the gradients of a mini-batch came to on one rank: loss and tally of the cells it is the first rank of."""

    loss: float
    tally: Tally
    replayed: dict[int, TrainedTokens] = field(default_factory=dict)
    """Samples by their number in the batch."""
    parted: PartedRoutes = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerTold:
    """What an optimizer step came to: the gradient norm before clipping, and the learning rate; the same on all ranks. metrics: norms
    of what is clipped by itself, as they are logged."""

    grad_norm: float
    lr: float
    metrics: dict[str, float] = field(default_factory=dict)
    load: ExpertLoad | None = None
    """Of the mini-batch, told by the first rank alone."""
