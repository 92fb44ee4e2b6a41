"""Routes of requests on a GPU, by the slots of vLLM's KV cache.

Each router writes its choice into the rows of the step's tokens, within the captured graphs; behind the forward pass the rows go where
keys and values of these tokens lie. A token found in the prefix cache has the routes of the forward pass that its keys are of, and a
drafted token that is not taken is written over, as its keys are. A request's routes come to the host once, when it is done.

Keys of a request that loses its place are computed anew, and its slots are given away: the routes of what was computed are kept on the
host, for the log-probs of its tokens are those of the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.errors import QuintetError
from quintet.rollout.vllm.compat import asked_as
from quintet.rollout.vllm.routes import asks


class SlotRoutes:
    """The routes of one worker's requests.

    runner: vLLM's second model runner, with its KV cache; group: which of its block tables holds all of a sequence; layers: the numbers
    of the layers with experts; experts, top_k: of a layer.
    """

    def __init__(self, runner: Any, group: int, layers: Sequence[int], experts: int, top_k: int) -> None:
        self._runner, self._group = runner, group
        self._place = {layer: at for at, layer in enumerate(sorted(layers))}
        self._silent = set(self._place)
        dtype = torch.uint8 if experts <= 256 else torch.int16
        size = (runner.max_num_tokens, len(self._place), top_k)
        # Captured graphs know where it is, so it is made once.
        self._step = torch.zeros(size, dtype=dtype, device=runner.device)
        self._slots: Tensor | None = None
        self._asked: dict[str, str] = {}
        """Requests under way that want their routes: by the name that they were added by, the worker's."""
        self._first: dict[str, np.ndarray] = {}
        """What was computed of requests that lost their place, of the first time."""
        self._ended: dict[str, tuple[Tensor, torch.cuda.Event | None, np.ndarray | None]] = {}

    def hear(self, layer: int) -> Callable[[Tensor], None]:
        """Return what the router of a layer is to call with its choice, [tokens, top-k]."""
        place = self._place[layer]

        def take(chosen: Tensor) -> None:
            self._silent.discard(layer)
            self._step[: len(chosen), place].copy_(chosen)

        return take

    def begin_step(self, step: Any) -> None:
        """Look at what vLLM's scheduler is about to do (its SchedulerOutput), before slots are given away."""
        for name in step.finished_req_ids:
            self._end(asked_as(name))
        for name in step.preempted_req_ids or ():
            self._keep(asked_as(name))
        for new in step.scheduled_new_reqs:
            name = asked_as(new.req_id)
            if asks(new.sampling_params):
                self._asked[name] = new.req_id
            if name in self._first:
                # The last of its tokens was not computed when it came, or what was drawn behind it was thrown away.
                self._first[name] = self._first[name][: len(new.prefill_token_ids) - 1]

    def end_step(self, tokens: int) -> None:
        """Put the routes of a step's tokens into their slots."""
        if not tokens:
            return
        tables = self._runner.block_tables
        if self._slots is None:
            slots = self._runner.kv_cache_config.num_blocks * tables.block_sizes[self._group]
            self._slots = self._step.new_zeros(slots, *self._step.shape[1:])
        self._slots[tables.slot_mappings[self._group, :tokens]] = self._step[:tokens]

    def keep(self) -> None:
        """Keep what was computed of all requests under way, which are about to lose their places."""
        for name in self._asked:
            self._keep(name)

    def release(self) -> None:
        """Give the memory of the slots back, whose requests are done or kept."""
        self._slots = None

    def take(self, requests: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the routes [tokens, layers with experts, top-k], uint8 or int16, of those of these requests that have any, and forget
        them. Raises QuintetError where a router was never heard."""
        if self._silent:
            raise QuintetError(
                f"vLLM asks no router of the layers {sorted(self._silent)} for its choice: there are no routes of it"
            )
        for name in requests:
            self._end(name)  # vLLM tells its workers only with the next step
        return {name: self._told(name) for name in requests if name in self._ended}

    def _told(self, name: str) -> np.ndarray:
        rows, copied, first = self._ended.pop(name)
        if copied is not None:
            copied.synchronize()
        return over(rows.numpy(), first)

    def _end(self, name: str) -> None:
        if name not in self._asked:
            return
        rows, copied = self._read(name).to("cpu", non_blocking=True), None
        if self._step.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        del self._asked[name]
        self._ended[name] = rows, copied, self._first.pop(name, None)

    def _keep(self, name: str) -> None:
        if name in self._asked:
            self._first[name] = over(self._read(name).cpu().numpy(), self._first.get(name))

    def _read(self, name: str) -> Tensor:
        """The routes of what was computed of a request, on the device."""
        states, tables = self._runner.req_states, self._runner.block_tables
        at = states.req_id_to_index.get(self._asked[name])
        if at is None or self._slots is None:  # it waits for a place
            return self._step[:0]
        computed, size = int(states.num_computed_tokens_np[at]), tables.block_sizes[self._group]
        blocks = tables.block_tables[self._group].gpu[at, : -(-computed // size)].long()
        slots = blocks[:, None] * size + torch.arange(size, device=blocks.device)
        return self._slots[slots.flatten()[:computed]]


def over(rows: np.ndarray, first: np.ndarray | None) -> np.ndarray:
    """Return a request's routes, of which the first ones are known from an earlier time."""
    if first is None or not len(first):
        return rows
    out = rows.copy() if len(rows) > len(first) else first.copy()
    out[: len(first)] = first
    return out


def of_worker(runner: Any, model: torch.nn.Module, groups: Sequence[Any]) -> SlotRoutes:
    """Return what hears all routers of a model, and bind it to them. groups: of vLLM's KV cache. Raises QuintetError where no group holds all of
    a sequence."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def keeps_all(spec: Any) -> bool:
        layers = getattr(spec, "kv_cache_specs", {"": spec})
        return all(isinstance(one, FullAttentionSpec) for one in layers.values())

    whole = [at for at, one in enumerate(groups) if keeps_all(one.kv_cache_spec)]
    if not whole:
        raise QuintetError(
            "rollout.return_routes: no layer of this model keeps keys of all tokens, by whose places vLLM's routes are kept"
        )
    found: Mapping[int, Any] = {one.layer_id: one for one in model.modules() if isinstance(one, FusedMoE)}
    some = next(iter(found.values()))
    routes = SlotRoutes(runner, whole[0], list(found), some.global_num_experts, some.top_k)
    for layer, module in found.items():
        module.router.set_capture_fn(routes.hear(layer))
    return routes
