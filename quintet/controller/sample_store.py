"""Samples stay in the process that generated them until the controller has planned who trains on what.

Then the keeper cuts out what each receiver needs: tokens and log-probs go from there straight to the ranks that train
on them, and are never on the controller, but for those of the few samples that a step keeps for replay.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from quintet.controller.messages import ReplayTokens, SampleInfo, TrainedTokens
from quintet.data.batch import Batch, concat, make_batch, offsets, select, tokens
from quintet.data.routes import RouteSizes, checked_routes, of_layers, seals
from quintet.rollout.base import Request, Sample

Place: TypeAlias = tuple[str, int]
"""A sample that is kept here: the call that made it, and its position in that."""


class SampleStore:
    """The samples of one process, by the call that made them. replayed: how many of a call, from the first, are told with their
    tokens. routes: those of the model, where they are kept for the ranks that train."""

    def __init__(self, replayed: int, routes: RouteSizes | None = None) -> None:
        self._batches: dict[str, Batch] = {}
        self._replayed, self._routes = replayed, routes

    def put(self, call: str, requests: Sequence[Request], answered: Sequence[Sequence[Sample]]) -> None:
        """Keep the responses to each request. Raises QuintetError for routes that cannot be replayed."""
        flat = [(r.prompt_ids, s) for r, row in zip(requests, answered, strict=True) for s in row]
        if flat:
            ids, fields = [prompt + s.response_ids for prompt, s in flat], {}
            # A call with a sample that was given up is not trained on: see `Controller.reward`.
            if self._routes is not None and all(s.finish != "abort" for _, s in flat):
                fields["routes"] = [
                    checked_routes(s.routes, len(one), self._routes, f"call {call}, sample {number}")
                    for number, (one, (_, s)) in enumerate(zip(ids, flat, strict=True))
                ]
            made = make_batch(
                ids,
                [len(prompt) for prompt, _ in flat],
                rollout_logprobs=[s.policy_logprobs for _, s in flat],
                **fields,
            )
            if fields:
                made["route_seals"] = seals(made)
            self._batches[call] = made

    def info(
        self, requests: Sequence[Request], at: int, group: Sequence[Sample], began: float = 0.0
    ) -> list[SampleInfo]:
        """Tell what the controller learns of the responses to the request at this place. began: when the call did, on the clock of
        `Sample.finished`."""
        prompt, before = requests[at].prompt_ids, self._replayed
        if at < before:  # no request is without samples
            before = sum(request.samples for request in requests[:at])
        return [
            SampleInfo(
                tokens=len(prompt) + len(s.response_ids),
                response_tokens=len(s.response_ids),
                finish=s.finish,
                text=s.text,
                logprob=_total(s.logprobs),
                raw_logprob=_total(s.raw_logprobs),
                kept=_whole(requests[at], s) if number < self._replayed else None,
                seconds=s.finished - began,
            )
            for number, s in enumerate(group, before)
        ]

    def of(self, call: str) -> Batch | None:
        """Return what a call made, if anything."""
        return self._batches.get(call)

    def forget(self, calls: Sequence[str]) -> None:
        """Drop what these calls made."""
        for call in calls:
            self._batches.pop(call, None)

    def slice_for(
        self, chosen: Sequence[Sequence[Place]], layers: Sequence[Sequence[int] | None]
    ) -> tuple[Any, ...]:
        """Cut the kept samples into what each receiver needs: calls and positions, by receiver, calls in one piece; and of which
        layers with experts it gets the routes.

        The first of the returned values is empty: it travels to the controller, the batches do not.
        """
        return None, *cut(self._batches, chosen, layers)


def _whole(request: Request, sample: Sample) -> ReplayTokens:
    ids = request.prompt_ids + sample.response_ids
    return ReplayTokens(ids, len(request.prompt_ids), sample.policy_logprobs, sample.routes)


def trained_samples(
    batch: Batch, wanted: dict[int, int], seen: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> dict[int, TrainedTokens]:
    """Return the samples as they were trained on, by number; wanted: number → position in the batch.

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
        told[number] = TrainedTokens(
            ids, prompt, rollout[start + prompt : end].tolist(), old[sample == at].float().tolist()
        )
    return told


def cut(
    batches: Mapping[str, Batch],
    chosen: Sequence[Sequence[Place]],
    layers: Sequence[Sequence[int] | None],
) -> list[Batch | None]:
    """Return the part of each receiver, with the routes of its layers; None for one that gets nothing."""
    parts: list[Batch | None] = []
    for places, wanted in zip(chosen, layers, strict=True):
        pieces = [
            of_layers(select(batches[call], [at for _, at in of_call]), wanted)
            for call, of_call in itertools.groupby(places, key=lambda place: place[0])
        ]
        parts.append(concat(pieces) if pieces else None)
    return parts


def _total(logprobs: list[float] | None) -> float | None:
    return None if logprobs is None else sum(logprobs)
