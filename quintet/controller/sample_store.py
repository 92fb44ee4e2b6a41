"""Samples stay in the process that generated them until the controller has planned who trains on what.

Then the keeper cuts out what each receiver needs: tokens and log-probs go from there straight to the ranks that train
on them, and are never on the controller, but for those of the few samples that a step keeps for replay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from quintet.controller.messages import ReplayTokens, SampleInfo, Trained
from quintet.data.batch import Batch, make_batch, offsets, select, tokens
from quintet.rollout import Request, Sample


class SampleStore:
    """The samples of one process, from one `keep` to the next. replayed: how many, from the first, are told with their
    tokens."""

    def __init__(self, replayed: int) -> None:
        self.batch: Batch | None = None
        self._replayed = replayed

    def put(
        self, requests: Sequence[Request], answered: Sequence[Sequence[Sample]]
    ) -> list[list[SampleInfo]]:
        """Keep the responses to each request, in place of what was kept, and tell what the controller learns of them."""
        flat = [(r.prompt_ids, s) for r, row in zip(requests, answered, strict=True) for s in row]
        self.batch = None
        if flat:
            self.batch = make_batch(
                [prompt + s.response_ids for prompt, s in flat],
                [len(prompt) for prompt, _ in flat],
                rollout_logprobs=[s.policy_logprobs for _, s in flat],
            )
        numbers = itertools.count()
        return [
            [
                SampleInfo(
                    tokens=len(r.prompt_ids) + len(s.response_ids),
                    response_tokens=len(s.response_ids),
                    finish=s.finish,
                    text=s.text,
                    logprob=_total(s.logprobs),
                    raw_logprob=_total(s.raw_logprobs),
                    kept=_whole(r, s) if next(numbers) < self._replayed else None,
                )
                for s in row
            ]
            for r, row in zip(requests, answered, strict=True)
        ]

    def slice_for(self, chosen: list[list[int]], advantages: list[list[float]]) -> tuple[Any, ...]:
        """Cut the kept samples into what each receiver needs: positions here and their advantages, by receiver.

        The first of the returned values is empty: it travels to the controller, the batches do not.
        """
        return None, *cut(self.batch, chosen, advantages)


def _whole(request: Request, sample: Sample) -> ReplayTokens:
    ids = request.prompt_ids + sample.response_ids
    return ReplayTokens(ids, len(request.prompt_ids), sample.policy_logprobs, sample.routes)


def trained_samples(
    batch: Batch, wanted: dict[int, int], seen: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> dict[int, Trained]:
    """Samples as they were trained on, by number; wanted: number → position in the batch.

    seen: of each micro-batch the sample of each trained token, and its old log-prob; a sample's tokens are in order.
    """
    if not wanted:
        return {}
    sample, old = (torch.cat([one[i] for one in seen]).cpu() for i in (0, 1))
    ends, rollout = offsets(batch), tokens(batch, "rollout_logprobs")
    told = {}
    for number, at in wanted.items():
        start, end = int(ends[at]), int(ends[at + 1])
        prompt = int(batch["prompt_length"][at])
        ids = tokens(batch, "input_ids")[start:end].tolist()
        told[number] = Trained(
            ids, prompt, rollout[start + prompt : end].tolist(), old[sample == at].float().tolist()
        )
    return told


def cut(samples: Batch | None, chosen: list[list[int]], advantages: list[list[float]]) -> list[Batch | None]:
    """The part of each receiver, with its advantages; None for one that gets nothing."""
    parts: list[Batch | None] = []
    for positions, values in zip(chosen, advantages, strict=True):
        if not positions or samples is None:
            parts.append(None)
            continue
        part = select(samples, positions)
        part["advantages"] = torch.tensor(values)
        parts.append(part)
    return parts


def _total(logprobs: list[float] | None) -> float | None:
    return None if logprobs is None else sum(logprobs)
