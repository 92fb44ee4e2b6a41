"""Samples stay in the process that generated them until the controller has planned who trains on what.

Then the keeper cuts out what each receiver needs: tokens and log-probs go from there straight to the ranks that train
on them, and are never on the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quintet.data.batch import Batch, make_batch, select
from quintet.rollout import Request, Sample
from quintet.train.messages import Generated


class Keeper:
    """The samples of one process, from one `keep` to the next."""

    def __init__(self) -> None:
        self.samples: Batch | None = None

    def keep(
        self, requests: Sequence[Request], answered: Sequence[Sequence[Sample]]
    ) -> list[list[Generated]]:
        """Keep the responses to each request, in place of what was kept, and tell what the controller learns of them."""
        flat = [(r.prompt_ids, s) for r, row in zip(requests, answered, strict=True) for s in row]
        self.samples = None
        if flat:
            self.samples = make_batch(
                [prompt + s.response_ids for prompt, s in flat],
                [len(prompt) for prompt, _ in flat],
                rollout_logprobs=[s.policy_logprobs for _, s in flat],
            )
        return [
            [
                Generated(
                    tokens=len(r.prompt_ids) + len(s.response_ids),
                    response_tokens=len(s.response_ids),
                    finish=s.finish,
                    text=s.text,
                    logprob=_total(s.logprobs),
                    raw_logprob=_total(s.raw_logprobs),
                )
                for s in row
            ]
            for r, row in zip(requests, answered, strict=True)
        ]

    def deal(self, chosen: list[list[int]], advantages: list[list[float]]) -> tuple[Any, ...]:
        """Cut the kept samples into what each receiver needs: positions here and their advantages, by receiver.

        The first of the returned values is empty: it travels to the controller, the batches do not.
        """
        return None, *cut(self.samples, chosen, advantages)


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
