"""The batches that reference and layouts train on, and the constants of their loss."""

from __future__ import annotations

import torch

VOCAB = 61  # odd: padding of the vocabulary is always in play under tp
PROMPT = 3
LENGTHS = [7, 12, 5, 20, 9, 16, 4, 11]
BATCHES = (LENGTHS, [10, 5, 8, 6], [8, 9, 5])
"""Lengths of the samples of each optimizer step. The last batches have fewer samples than some layouts have dp ranks."""
BF16_BATCH = 2
"""The one step of a case in bf16: see `reference` on routes."""
TEMPERATURE = 0.8
ENTROPY_WEIGHT = 0.1


def token_ids(batch: int = 0) -> list[list[int]]:
    """Samples of BATCHES[batch] tokens, PROMPT of each the prompt."""
    generator = torch.Generator().manual_seed(1 + batch)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in BATCHES[batch]]


def routes(batch: int, layers: int, experts: int, top_k: int) -> list[torch.Tensor]:
    """What a rollout is to have told of the samples of a batch: uint8 [tokens - 1, layers, top-k] each. They are drawn, so that few
    tokens would choose them, in no order of their weights, and across groups of experts."""
    generator = torch.Generator().manual_seed(50 + batch)
    drawn = [torch.rand(n - 1, layers, experts, generator=generator) for n in BATCHES[batch]]
    return [one.topk(top_k).indices.to(torch.uint8) for one in drawn]


AHEAD_WEIGHT, AHEAD_CLIP = 0.3, 0.5
"""Of the loss of layers for multi-token prediction, and the norm that their gradients are clipped to."""


def loss_mask(length: int, ahead: bool = False) -> list[float]:
    """Which tokens of a sample are trained: its response, less every fifth token (as a tool's answer would be). ahead: with layers
    for multi-token prediction prompts have one token, and of short samples what the second depth would predict is not trained."""
    first, last = (1, 2 if length < 6 else length) if ahead else (PROMPT, length)
    return [float(first <= t <= last and t % 5 != 4) for t in range(length)]


def ahead_counts(batch: int, depths: int) -> list[int]:
    """The global counts of a batch's target sets, the model's own first."""
    masks = [loss_mask(n, ahead=True) for n in BATCHES[batch]]
    return [int(sum(sum(mask[1 + depth :]) for mask in masks)) for depth in range(1 + depths)]


def returns(length: int) -> list[float]:
    """What a value model is to say at each token of a sample."""
    return [((7 * t + length) % 11) / 5 - 1 for t in range(length)]


def trained_tokens(batch: int) -> int:
    """The global count that the loss of a batch is divided by."""
    return int(sum(sum(loss_mask(n)) for n in BATCHES[batch]))
