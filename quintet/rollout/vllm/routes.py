"""The experts that each token was sent to, where vLLM runs on a CPU: written down inside its worker, at the routers.

A token found in the prefix cache passes no router, so on CPU that cache is off where routes are asked for. On a GPU: see `token_store`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from quintet.errors import QuintetError
from quintet.models import ModelShape
from quintet.rollout.vllm.compat import asked_as
from quintet.rollout.vllm.token_records import ROUTES, TokenRecords, asks

ROOM = 64
"""Tokens by which a request's memory grows at least."""


class Listener:
    """Writes down the routes of the requests of one worker on a CPU. runner: vLLM's; layers: the numbers of its layers with experts."""

    def __init__(self, runner: Any, layers: Sequence[int]) -> None:
        self._runner = runner
        self._place = {layer: at for at, layer in enumerate(sorted(layers))}
        self._of: dict[str, np.ndarray] = {}

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Take from a router, in the middle of a step, the experts of all its tokens [tokens, top-k]: those of one
        request after another, each from its first token that was not computed before. What a preempted request computes again
        is not taken: the log-probs of its tokens are those of the first time, and so are its routes."""
        chosen = topk_ids.cpu().numpy()
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        for at, request in enumerate(batch.req_ids):
            if not asks(self._runner.requests[request].sampling_params):
                continue
            rows = chosen[starts[at] : starts[at + 1]]
            first = int(batch.num_computed_tokens_cpu[at])
            held = self._room(request, first + len(rows), rows.shape[1])
            here = held[first : first + len(rows), self._place[layer_id]]
            fresh = here[:, 0] < 0
            here[fresh] = rows[fresh]

    def take(self, requests: Sequence[str]) -> dict[str, TokenRecords]:
        """Return the routes, int16, of those of these requests that have any, and forget them; -1 where a token was not seen."""
        return {name: {ROUTES: self._of.pop(name)} for name in requests if name in self._of}

    def forget(self, requests: Sequence[str]) -> None:
        """Forget the routes of these requests."""
        for name in requests:
            self._of.pop(name, None)

    def _room(self, request: str, tokens: int, top_k: int) -> np.ndarray:
        name = asked_as(request)
        held = self._of.get(name)
        if held is None or len(held) < tokens:
            more = tokens + max(ROOM, tokens // 2)
            grown = np.full((more, len(self._place), top_k), -1, np.int16)
            if held is not None:
                grown[: len(held)] = held
            held = self._of[name] = grown
        return held


def of_all_layers(workers: Sequence[Mapping[str, TokenRecords]], tp: int) -> dict[str, TokenRecords]:
    """Return what workers wrote down, with the routes of all layers: one stage after another, whose tp workers hear the same."""
    stages = workers[::tp]
    if len(stages) == 1:
        return dict(stages[0])
    return {
        name: {ROUTES: np.concatenate([stage[name][ROUTES] for stage in stages], axis=1)}
        for name in stages[0]
    }


def routes_of(told: np.ndarray, shape: ModelShape, tokens: int) -> np.ndarray:
    """Return `Sample.routes` of a sequence of `tokens` tokens: [tokens - 1, layers with experts, top-k].

    told: [at least tokens - 1, layers, top-k], where layers without experts may be among them, whose numbers say nothing.
    Raises QuintetError where a token's routes are not known.
    """
    assert shape.moe is not None
    layers = list(shape.moe_layers)
    routes = told[: tokens - 1]
    if told.shape[1] == shape.layers > len(layers):
        routes = routes[:, layers]
    unknown = routes.dtype != np.uint8 and (routes < 0).any()
    if routes.shape != (tokens - 1, len(layers), shape.moe.top_k) or unknown:
        raise QuintetError(
            f"vLLM told routes {list(told.shape)} of {tokens} tokens: those of every token but the last are needed, for "
            f"{len(layers)} layers with experts and {shape.moe.top_k} experts a token"
        )
    return routes
