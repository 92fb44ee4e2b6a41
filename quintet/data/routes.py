"""Routes that a rollout told, on their way to the ranks that replay them.

They are looked at where they come from, and sealed: a number of each sample and layer follows from the routes and from the tokens
they are of, so that a rank that gets other ones, or those of another sample of the same length, finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quintet.data.batch import Batch, offsets, tokens
from quintet.errors import QuintetError
from quintet.models import ModelShape
from quintet.models.shape import route_bytes

_OF_ID, _OF_PLACE, _OF_RANK = 0x9E3779B97F4A7C15 - (1 << 64), 0x632BE59BD9B4E019, 0x2545F4914F6CDD1D
"""Odd numbers of 64 bits, which wrap."""


class RouteSizes(NamedTuple):
    """What a model's routes are: layers with experts, experts in each, and how many of them a token is sent to."""

    layers: int
    experts: int
    top_k: int

    @classmethod
    def of(cls, shape: ModelShape) -> RouteSizes:
        """Return those of a model with experts."""
        assert shape.moe is not None, "a model without experts has no routes"
        return cls(len(shape.moe_layers), shape.moe.experts, shape.moe.top_k)

    @property
    def dtype(self) -> type[np.uint8 | np.int16]:
        """The smallest type that holds them."""
        return np.uint8 if route_bytes(self.experts) == 1 else np.int16


def checked_routes(routes: np.ndarray | None, tokens: int, sizes: RouteSizes, of: str) -> np.ndarray:
    """Return the routes [tokens - 1, layers, top-k] of a sample of so many tokens in the smallest type. of: which it is.

    Raises QuintetError where there are none, where they have another shape, for an expert that there is not, and for one that a token
    is sent to twice.
    """
    if routes is None:
        raise QuintetError(
            f"{of}: the rollout told no routes of it, and engine.replay_routes=rollout replays them"
        )
    expected = (tokens - 1, sizes.layers, sizes.top_k)
    if routes.shape != expected:
        raise QuintetError(
            f"{of}: the rollout told routes {list(routes.shape)}, and those of {tokens} tokens are {list(expected)}: every token but "
            "the last, layers with experts, experts a token"
        )
    if routes.size and not (routes.min() >= 0 and routes.max() < sizes.experts):
        raise QuintetError(
            f"{of}: the rollout told routes to the experts {routes.min()} to {routes.max()}, and there are {sizes.experts}"
        )
    small = routes.astype(sizes.dtype, order="C")  # cut by layer, it lies otherwise
    for one in range(sizes.top_k):
        for other in range(one):
            same = small[..., one] == small[..., other]
            if same.any():
                token, layer = np.argwhere(same)[0]
                raise QuintetError(
                    f"{of}: the rollout told that token {token} goes to expert {small[token, layer, one]} twice, in the "
                    f"{layer + 1}. layer with experts"
                )
    return small


def seals(batch: Batch) -> Tensor:
    """Return a number of each sample and layer of a batch with routes: int64 [samples, layers], of ids and routes together."""
    told = batch["routes"]
    flat, ends = told.values(), told.offsets()
    sizes = ends.diff()
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    place = torch.arange(len(flat)) - ends[:-1][owner]
    ids = tokens(batch, "input_ids")[offsets(batch)[owner] + place]
    ranks = torch.arange(1, flat.shape[2] + 1) * _OF_RANK
    out = torch.zeros(len(sizes), flat.shape[1], dtype=torch.int64)
    # A token's experts may come in any order, as long as it stays the same one.
    of_token = (ids + 1) * _OF_ID + (place + 1) * _OF_PLACE
    for layer in range(flat.shape[1]):
        of_routes = ((flat[:, layer].long() + 1) * ranks).sum(1)
        mixed = of_token * of_routes
        out[:, layer].index_add_(0, owner, mixed ^ (mixed >> 29))
    return out


def check_seals(batch: Batch, sealed: Tensor, numbers: Sequence[int]) -> None:
    """Raise QuintetError where routes of a batch are not those that were sealed with its samples. numbers: of the samples."""
    wrong = (seals(batch) != sealed).any(1).nonzero()[:, 0].tolist()
    if wrong:
        raise QuintetError(
            f"sample {numbers[wrong[0]]}: its routes are not those that the rollout told of it ({len(wrong)} of {len(numbers)} samples)"
        )


def of_layers(batch: Batch, layers: Sequence[int] | None) -> Batch:
    """Return a batch with routes of these layers alone, numbered among those with experts; with None, without routes."""
    if "routes" not in batch:
        return batch
    if layers is None:
        return batch.exclude("routes", "route_seals")
    told = batch["routes"]
    kept = told.values()[:, list(layers)].contiguous()
    routes = torch.nested.nested_tensor_from_jagged(kept, told.offsets())
    out = batch.exclude("routes", "route_seals")
    out["routes"], out["route_seals"] = routes, batch["route_seals"][:, list(layers)]
    return out
