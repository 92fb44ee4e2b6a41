"""The experts that each token was sent to.

Requests that ask for them (`ASKS`) have their routes written down inside vLLM's worker, at the routers, and told by name when they
are done: on a CPU by `Listener`, on a GPU by `slot_routes.SlotRoutes`. On a CPU a token found in the prefix cache passes no router, so
that cache is off there where routes are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from quintet.errors import QuintetError
from quintet.models.shape import ModelShape
from quintet.rollout.vllm.compat import asked_as
from quintet.typed import Typed

ROOM = 64
"""Tokens by which a request's memory grows at least."""
ASKS = {"routes": True}
"""Of vLLM's SamplingParams the `extra_args` of a request whose routes are wanted."""


def asks(params: Any) -> bool:
    """Return whether a request with these SamplingParams of vLLM wants its routes."""
    return params is not None and (params.extra_args or {}).get("routes") is True


@dataclass(frozen=True)
class _Head:
    """What is behind it, an array after the other: tokens by request, and what is alike in all."""

    tokens: dict[str, int]
    layers: int
    top_k: int
    dtype: str


class ToldRoutes:
    """Routes by request on their way to another process, in place of `Typed`: numbers as they lie in memory behind a line of JSON."""

    what = "routes of requests"
    _head: Typed[_Head] = Typed(_Head, what)

    def dump(self, value: Mapping[str, np.ndarray]) -> bytes:
        """Return the bytes of arrays [tokens, layers, top-k] of one type."""
        sizes = {name: len(one) for name, one in value.items()}
        some = next(iter(value.values()), np.empty((0, 0, 0), np.int16))
        head = self._head.dump(_Head(sizes, some.shape[1], some.shape[2], some.dtype.name))
        return b"".join([head, b"\n", *(np.ascontiguousarray(one).data for one in value.values())])

    def load(self, data: bytes, source: str) -> dict[str, np.ndarray]:
        """Return the arrays. Raises QuintetError naming `source`, where they came from, when they are not what the head says."""
        line, _, numbers = data.partition(b"\n")
        head = self._head.load(line, source)
        ends = np.cumsum([0, *head.tokens.values()])
        expected = int(ends[-1]) * head.layers * head.top_k
        if head.dtype not in ("uint8", "int16") or len(numbers) != expected * np.dtype(head.dtype).itemsize:
            raise QuintetError(f"what came from {source} is not {self.what}: {len(numbers)} bytes of {head}")
        flat = np.frombuffer(numbers, head.dtype).reshape(int(ends[-1]), head.layers, head.top_k)
        return {name: flat[ends[at] : ends[at + 1]] for at, name in enumerate(head.tokens)}


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

    def take(self, requests: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the routes, int16 [tokens, layers with experts, top-k], of those of these requests that have any, and forget them; -1
        where a token was not seen."""
        return {name: self._of.pop(name) for name in requests if name in self._of}

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


def heard(workers: Sequence[Mapping[str, np.ndarray]], tp: int) -> dict[str, np.ndarray]:
    """Return the routes of all layers, of what each worker heard: one stage after another, whose tp workers hear the same."""
    stages = workers[::tp]
    if len(stages) == 1:
        return dict(stages[0])
    return {request: np.concatenate([stage[request] for stage in stages], axis=1) for request in stages[0]}


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
