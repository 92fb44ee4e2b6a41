"""Greedy responses: the rollout's, and what transformers says."""

from __future__ import annotations

import functools

import torch

from quintet.rollout.base import Request, Sampling
from tests.rollout.prompts import PROMPTS
from tests.rollout.vllm.models import model


@functools.cache
def made(name: str, seed: int = 0):
    return model(name, seed=seed)


def greedy(rollout, tokens: int = 8) -> list[list[int]]:
    """The rollout's greedy responses to PROMPTS."""
    rows = rollout.generate(
        [Request(p) for p in PROMPTS], Sampling(temperature=0, max_response_tokens=tokens)
    )
    return [sample.response_ids for (sample,) in rows]


@functools.cache
def greedy_by_transformers(name: str, tokens: int, seed: int = 0) -> list[list[int]]:
    """Its greedy responses to PROMPTS."""
    rows = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(tokens):
                ids.append(int(made(name, seed)(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        rows.append(ids[len(prompt) :])
    return rows


def logprobs_by_transformers(name: str, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Its log-probs of every token but the first, given those before it."""
    with torch.no_grad():
        rows = (made(name)(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
