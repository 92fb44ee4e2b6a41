"""What vLLM's worker on a GPU writes down of tokens, by the slots of its KV cache: log-probs, and routes of experts. A part of `compat` by
what it knows of vLLM, apart by its length.

Behind each forward pass the numbers of its tokens go where their keys and values lie: the choice of every router, and the log-prob of the
token that was drawn from there. So a token found in the prefix cache has the routes of the forward pass that its keys are of, and a drafted
token that is not taken is written over, as its keys are. What is of a request comes to the host once, when it is done; by vLLM's own way
each token's log-prob would pass through Python.

Keys of a request that loses its place are computed anew, and its slots are given away: what was written of the tokens that it has is kept on
the host, for these were drawn the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.engine.device import download, upload
from quintet.errors import QuintetError
from quintet.rollout.vllm.compat import asked_as
from quintet.rollout.vllm.token_records import LOGPROBS, ROUTES, TokenRecords, asks

MOST_TOKENS = 1 << 16
"""Of which what is written comes to the host in one copy: until then it lies beside a full KV cache once more."""


class TokenStore:
    """What is written down of the tokens of one worker's requests.

    runner: vLLM's second model runner, with its KV cache; group: which of its block tables holds all of a sequence; tells: whether this
    worker is the one of its tensor-parallel ranks, which all know the same, that is asked.
    """

    def __init__(self, runner: Any, group: int, *, tells: bool = True) -> None:
        self._runner, self._group, self._tells = runner, group, tells
        self._columns: dict[str, Tensor] = {
            LOGPROBS: torch.empty(0, dtype=torch.float32, device=runner.device)
        }
        """By what it is of a token, an empty tensor of its type and further dims."""
        self._slots: dict[str, Tensor] = {}
        self._step = torch.empty(0)
        self._silent: set[int] = set()
        self._asked: dict[str, str] = {}
        """Requests under way that want it: by the name that they were added by, the worker's."""
        self._first: dict[str, TokenRecords] = {}
        self._ended: dict[str, Callable[[], TokenRecords]] = {}
        """Requests that are done, and what waits until that of each has come to the host."""

    def routers(self, layers: Sequence[int], experts: int, top_k: int) -> dict[int, Callable[[Tensor], None]]:
        """Begin to write down routes; return what the router of each of these layers is to call with its choice [tokens, top-k]. experts, top_k: of
        a layer."""
        dtype = torch.uint8 if experts <= 256 else torch.int16
        size = (self._runner.max_num_tokens, len(layers), top_k)
        # Captured graphs know where it is, so it is made once.
        self._step = torch.zeros(size, dtype=dtype, device=self._runner.device)
        self._columns[ROUTES] = self._step[:0]
        self._silent = set(layers)

        def of(place: int, layer: int) -> Callable[[Tensor], None]:
            def write(chosen: Tensor) -> None:
                self._silent.discard(layer)
                self._step[: len(chosen), place].copy_(chosen)

            return write

        return {layer: of(place, layer) for place, layer in enumerate(sorted(layers))}

    def begin_step(self, step: Any) -> None:
        """Look at what vLLM's scheduler is about to do (its SchedulerOutput), before slots are given away."""
        self._end(map(asked_as, step.finished_req_ids))
        self._keep(map(asked_as, step.preempted_req_ids or ()))
        for new in step.scheduled_new_reqs:
            name = asked_as(new.req_id)
            if self._tells and asks(new.sampling_params):
                self._asked[name] = new.req_id
            if name in self._first:
                # From the last of its tokens nothing was drawn that it still has; from its prompt alone, nothing at all.
                known = len(new.prefill_token_ids)
                kept = known - 1 if known > len(new.prompt_token_ids) else 0
                self._first[name] = {what: rows[:kept] for what, rows in self._first[name].items()}

    def end_forward(self, tokens: int) -> None:
        """Put the routes of a step's tokens into their slots."""
        if tokens and ROUTES in self._columns:
            self._put(ROUTES, self._slots_of()[:tokens], self._step[:tokens])

    def end_draw(self, rows: Tensor, logprobs: Tensor) -> None:
        """Put the log-probs of drawn tokens into the slots of those that they were drawn from. rows: places of these in the step, [n]."""
        self._put(LOGPROBS, self._slots_of()[rows], logprobs)

    def keep(self) -> None:
        """Keep what was written of all requests under way, which are about to lose their places."""
        self._keep(self._asked)

    def release(self) -> None:
        """Give the memory of the slots back, whose requests are done or kept: of routes, for log-probs are little, and captured graphs know
        where they go."""
        self._slots.pop(ROUTES, None)

    def take(self, requests: Sequence[str]) -> dict[str, TokenRecords]:
        """Return what was written of those of these requests that asked for it, a row a token that was computed, and forget it. Raises
        QuintetError where a router was never heard."""
        if self._silent:
            raise QuintetError(
                f"vLLM asks no router of the layers {sorted(self._silent)} for its choice, as one kernel routes and computes there: no "
                "routes of them can be replayed; use engine.replay_routes=old or null, and rollout.return_routes=false"
            )
        self._end(requests)  # vLLM tells its workers only with the next step
        return {name: self._ended.pop(name)() for name in requests if name in self._ended}

    def forget(self, requests: Sequence[str]) -> None:
        """Forget what was written of these requests, and write no more of them."""
        for name in requests:
            for kept in (self._asked, self._first, self._ended):
                kept.pop(name, None)

    def _end(self, names: Iterable[str]) -> None:
        for name, records in self._read(names):
            del self._asked[name]
            self._ended[name] = partial(records, self._first.pop(name, {}))

    def _keep(self, names: Iterable[str]) -> None:
        for name, records in self._read(names):
            self._first[name] = records(self._first.get(name, {}))

    def _read(self, names: Iterable[str]) -> Iterator[tuple[str, Callable[[TokenRecords], TokenRecords]]]:
        """Begin to bring to the host what is written of the tokens that were computed of those of these requests that asked for it: many in
        one copy, for the launches of one a request are more than all else that a step adds. Yields each with what waits for it, and
        takes what was kept of its first tokens."""
        states, some, tokens = self._runner.req_states, list[tuple[str, int, int]](), 0
        for name in names:
            if name in self._asked:
                at = states.req_id_to_index.get(self._asked[name], -1)  # -1: it waits for a place
                count = int(states.num_computed_tokens_np[at]) if at >= 0 else 0
                if some and tokens + count > MOST_TOKENS:
                    yield from self._read_together(some)
                    some, tokens = [], 0
                some.append((name, at, count))
                tokens += count
        if some:
            yield from self._read_together(some)

    def _read_together(
        self, requests: Sequence[tuple[str, int, int]]
    ) -> Iterator[tuple[str, Callable[[TokenRecords], TokenRecords]]]:
        """As `_read`, of requests by name, row of the block table, and how many tokens."""
        names, at, counts = zip(*requests, strict=True)
        tables = self._runner.block_tables
        table, size = tables.block_tables[self._group].gpu, tables.block_sizes[self._group]
        ends = np.cumsum([0, *counts])
        # The device finds where each token is: a host took 50 ms for 330,000 of them, all of which ended together.
        row, begin, count = upload(torch.from_numpy(np.stack([at, ends[:-1], counts])), table.device)
        of = torch.repeat_interleave(count, output_size=int(ends[-1]))
        place = torch.arange(len(of), device=table.device) - begin[of]
        slots = table[row[of], place // size].long() * size + place % size
        told = {
            what: download(self._slots[what][slots] if what in self._slots else empty[:0])
            for what, empty in self._columns.items()
        }
        for name, begin, end in zip(names, ends, ends[1:], strict=False):
            yield name, partial(_cut, told, begin, end)

    def _slots_of(self) -> Tensor:
        """The slots of the step's tokens."""
        slots: Tensor = self._runner.block_tables.slot_mappings[self._group]
        return slots

    def _put(self, what: str, slots: Tensor, rows: Tensor) -> None:
        if what not in self._slots:
            size = self._runner.block_tables.block_sizes[self._group]
            empty = self._columns[what]
            # One more, the last: the slot of what is no token of any sequence is -1.
            slots_there = self._runner.kv_cache_config.num_blocks * size + 1
            self._slots[what] = empty.new_zeros(slots_there, *empty.shape[1:])
        self._slots[what][slots] = rows


def _cut(told: Mapping[str, Callable[[], Tensor]], begin: int, end: int, first: TokenRecords) -> TokenRecords:
    """What is of one request, of whose tokens the first ones may be known from an earlier time. Copied: what came with it stays until the
    last of it is taken, and no longer."""
    rows = {what: wait()[begin:end].numpy() for what, wait in told.items()}
    kept = {what: first.get(what, now[:0]) for what, now in rows.items()}
    return {what: np.concatenate([kept[what], now[len(kept[what]) :]]) for what, now in rows.items()}


def store_of(runner: Any, groups: Sequence[Any], *, routes: bool, tells: bool) -> TokenStore:
    """Return what writes down log-probs, and with `routes` what all routers of the policy choose. groups: of vLLM's KV cache. Raises
    QuintetError where no group holds all of a sequence."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def keeps_all(spec: Any) -> bool:
        layers = getattr(spec, "kv_cache_specs", {"": spec})
        return all(isinstance(one, FullAttentionSpec) for one in layers.values())

    whole = [at for at, one in enumerate(groups) if keeps_all(one.kv_cache_spec)]
    if not whole:
        raise QuintetError(
            "vLLM keeps keys of all tokens in no layer of this model, by whose places log-probs and routes are written down; "
            "VLLM_USE_V2_MODEL_RUNNER=0 in the environment takes the runner that tells log-probs itself"
        )
    store = TokenStore(runner, whole[0], tells=tells)
    if routes:
        found = {one.layer_id: one for one in runner.get_model().modules() if isinstance(one, FusedMoE)}
        if not found:
            raise QuintetError(
                "rollout.return_routes=true: vLLM computes this model without its layers of experts, whose routers would be asked; use "
                "rollout.return_routes=false"
            )
        some = next(iter(found.values()))
        for layer, write in store.routers(list(found), some.global_num_experts, some.top_k).items():
            found[layer].router.set_capture_fn(write)
    return store
