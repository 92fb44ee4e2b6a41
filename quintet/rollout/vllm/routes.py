"""The experts that each token was sent to.

vLLM tells them with its samples on GPUs, where its scheduler is made to keep those of a request that loses its place. Its runner for
the CPU does not; there they are written down inside its worker, at the routers. A token found in the prefix cache passes no router,
so on CPU that cache is off where routes are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Base64Bytes
from torch import Tensor

from quintet.errors import QuintetError
from quintet.models.shape import ModelShape

ROOM = 64
"""Tokens by which a request's memory grows at least."""


@dataclass(frozen=True)
class Told:
    """Routes on their way to another process: int16 of this shape."""

    shape: tuple[int, int, int]
    data: Base64Bytes

    @classmethod
    def of(cls, routes: np.ndarray) -> Told:
        tokens, layers, top_k = routes.shape
        return cls((tokens, layers, top_k), routes.tobytes())

    def routes(self) -> np.ndarray:
        return np.frombuffer(self.data, np.int16).reshape(self.shape)


class Listener:
    """Writes down the routes of all requests of one worker. runner: vLLM's; layers: the numbers of its layers with experts."""

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
            rows = chosen[starts[at] : starts[at + 1]]
            first = int(batch.num_computed_tokens_cpu[at])
            held = self._room(request, first + len(rows), rows.shape[1])
            here = held[first : first + len(rows), self._place[layer_id]]
            fresh = here[:, 0] < 0
            here[fresh] = rows[fresh]

    def take(self) -> dict[str, np.ndarray]:
        """Return the routes, int16 [tokens, layers with experts, top-k] of each request since the last call, by vLLM's names for
        them; -1 where a token was not seen."""
        found, self._of = self._of, {}
        return found

    def _room(self, request: str, tokens: int, top_k: int) -> np.ndarray:
        held = self._of.get(request)
        if held is None or len(held) < tokens:
            more = tokens + max(ROOM, tokens // 2)
            grown = np.full((more, len(self._place), top_k), -1, np.int16)
            if held is not None:
                grown[: len(held)] = held
            held = self._of[request] = grown
        return held


class KeepsFirstRoutes:
    """The part of vLLM's scheduler that reads routes and takes places away, for GPUs.

    vLLM 0.20.2 tells the routes that lie in a request's KV slots at its end. Those of one that was preempted, or held while new
    weights came, are of the forward that read it anew; the log-probs of its tokens are of their first one (test_routes.py, on a GPU).
    Steps are not scheduled ahead (`async_scheduling` is off), so that what computed tokens were sent to lies there when a place is taken.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first: dict[str, np.ndarray] = {}

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a request's place, and keep the routes of what was computed of it."""
        told, computed = self._get_routed_experts(request), request.num_computed_tokens
        if told is not None and computed > len(self._first.get(request.request_id, ())):
            self._first[request.request_id] = told[:computed]
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _get_routed_experts(self, request: Any) -> np.ndarray | None:
        """Return the routes [tokens - 1, layers, top-k] of a request."""
        told: np.ndarray | None = super()._get_routed_experts(request)  # type: ignore[misc]
        if told is not None and (first := self._first.get(request.request_id)) is not None:
            told[: len(first)] = first[: len(told)]
        return told

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Forget a request that is done or given up."""
        self._first.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


def heard(workers: Sequence[dict[str, Told]], tp: int) -> dict[str, np.ndarray]:
    """Return the routes of all layers, of what each worker heard: one stage after another, whose tp workers hear the same."""
    stages = workers[::tp]
    return {
        request: np.concatenate([stage[request].routes() for stage in stages], axis=1)
        for request in stages[0]
    }


def routes_of(told: np.ndarray, shape: ModelShape, tokens: int) -> np.ndarray:
    """Return `Sample.routes` of a sequence of `tokens` tokens: int16 [tokens - 1, layers with experts, top-k].

    told: [at least tokens - 1, layers, top-k], where layers without experts may be among them, whose numbers say nothing.
    Raises QuintetError where a token's routes are not known.
    """
    assert shape.moe is not None
    layers = list(shape.moe_layers)
    routes = told[: tokens - 1, layers if told.shape[1] == shape.layers else slice(None)].astype(np.int16)
    if routes.shape != (tokens - 1, len(layers), shape.moe.top_k) or (routes < 0).any():
        raise QuintetError(
            f"vLLM told routes {list(told.shape)} of {tokens} tokens: those of every token but the last are needed, for "
            f"{len(layers)} layers with experts and {shape.moe.top_k} experts a token"
        )
    return routes
