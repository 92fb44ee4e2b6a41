"""Steps that are scheduled here are those of vLLM: the same requests draw the same tokens, and end the same way."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.rollout.vllm import compat

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        (compat.installed() or ("",))[0] != "vllm",
        reason="the scheduler is that of vLLM for GPUs, whose steps it knows",
    ),
]
BLOCK, LONGEST, SLOTS = 4, 64, 8
STREAMED = "streamed"
RARE = 3199, 3324
"""Seeds of what is rare: a full block is to be found in the cache though its request has no step under way."""


@dataclass
class Asked:
    """A request: when it comes, what it reads, and what ends it."""

    name: str
    at: int
    prompt: list[int]
    params: dict[str, Any]


@dataclass
class Went:
    """What a run came to."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[dict[str, int], dict[str, list[int]]]] = field(default_factory=list)
    """Tokens and new blocks by request."""
    told: dict[str, int] = field(default_factory=dict)
    """How often something was told of requests that are to be told of each step."""
    queries: int = 0
    hits: int = 0


def scheduler_of(kind: type[Any], blocks: int, budget: int, *, caching: bool) -> Any:
    """A scheduler with so many blocks of KV cache, and so many tokens a step."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    of = SimpleNamespace
    config = of(
        scheduler_config=of(
            max_num_seqs=SLOTS,
            max_num_scheduled_tokens=None,
            max_num_batched_tokens=budget,
            policy="fcfs",
            long_prefill_token_threshold=0,
            enable_chunked_prefill=True,
            scheduler_reserve_full_isl=False,
            async_scheduling=True,
        ),
        cache_config=of(num_gpu_blocks=blocks, enable_prefix_caching=caching, mamba_cache_mode="none"),
        lora_config=None,
        kv_events_config=None,
        parallel_config=of(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_index=0,
        ),
        observability_config=of(kv_cache_metrics=False, enable_mfu_metrics=False),
        model_config=of(is_encoder_decoder=False, max_model_len=LONGEST, enable_return_routed_experts=False),
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
    )
    registry = of(supports_multimodal_inputs=lambda _: False)
    grammars = of(should_advance=lambda _: False)
    return kind(config, cache, grammars, BLOCK, mm_registry=registry, log_stats=True)


class Worker:
    """What vLLM's second runner keeps of requests: their blocks, and how many of their tokens it has read."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.read: dict[str, int] = {}
        self.known: dict[str, int] = {}

    def run(self, step: Any) -> Any:
        """Draw a step's tokens, each of which follows from the request and its place."""
        for one in {*step.finished_req_ids, *(step.preempted_req_ids or ())}:
            self.blocks.pop(one, None)
        for new in step.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.read[new.req_id] = new.num_computed_tokens
            self.known[new.req_id] = len(new.prefill_token_ids)
        grown = step.scheduled_cached_reqs
        for name, blocks in zip(grown.req_ids, grown.new_block_ids, strict=True):
            self.blocks[name] += blocks[0] if blocks is not None else []
        assert len(self.blocks) <= SLOTS, "a request whose end was not told keeps its row"
        names, drawn = list(step.num_scheduled_tokens), list[list[int]]()
        for name in names:
            self.read[name] += step.num_scheduled_tokens[name]
            assert self.read[name] <= BLOCK * len(self.blocks[name]), "a token without a slot"
            assert self.read[name] <= self.known[name], "a token that nothing is known of"
            ready = self.read[name] == self.known[name]
            drawn.append([token(name, self.known[name])] if ready else [])
            self.known[name] += ready
        for one in names:
            mine = self.blocks[one]
            assert len(set(mine)) == len(mine), "a block is there twice"
        return SimpleNamespace(
            sampled_token_ids=drawn,
            req_id_to_index={name: at for at, name in enumerate(names)},
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            num_nans_in_logits=None,
            kv_connector_output=None,
            cudagraph_stats=None,
        )


def token(name: str, place: int) -> int:
    """What is drawn for a request at a place of its sequence."""
    return random.Random(f"{name} {place}").randrange(2, 12)


def went(
    kind: type[Any],
    asked: list[Asked],
    events: dict[int, str],
    *,
    blocks: int,
    budget: int,
    caching: bool,
    early: float,
    at_end: bool,
) -> Went:
    """Run requests to their end as vLLM's engine does with two steps under way. events: by step, what happens before it. early: how often a
    step is done before the next is scheduled; at_end: see `WholeScheduler.tells_at_end`."""
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import Request, RequestStatus

    hashing = get_hash_fn_by_name("sha256")
    init_none_hash(hashing)
    hasher = get_request_block_hasher(BLOCK, hashing) if caching else None
    scheduler, worker, found = scheduler_of(kind, blocks, budget, caching=caching), Worker(), Went()
    scheduler.tells_at_end = at_end
    waiting, under_way, draw = deque(asked), deque[tuple[Any, Any]](), random.Random(asked[0].name)
    for number in range(10_000):
        while waiting and waiting[0].at <= number:
            one = waiting.popleft()
            params = SamplingParams(**one.params)
            params.update_from_generation_config({}, 1)
            scheduler.add_request(
                Request(one.name, one.prompt, params, None, block_hasher=hasher, arrival_time=0.0)
            )
        match events.get(number):
            case "abort":
                for name in list(scheduler.requests)[:: draw.randrange(1, 4)]:
                    found.tokens[name] = list(scheduler.requests[name].output_token_ids)
                    found.finish[name] = "abort"
                    scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            case "forget":
                scheduler.reset_prefix_cache(reset_running_requests=True)
            case "pause":
                scheduler.set_pause_state(PauseState.PAUSED_ALL)
            case "resume":
                scheduler.set_pause_state(PauseState.UNPAUSED)
        if scheduler.has_requests():
            step = scheduler.schedule()
            grown = step.scheduled_cached_reqs
            taken = {
                name: one[0] for name, one in zip(grown.req_ids, grown.new_block_ids, strict=True) if one
            }
            taken |= {new.req_id: list(new.block_ids[0]) for new in step.scheduled_new_reqs}
            found.steps.append((dict(step.num_scheduled_tokens), taken))
            under_way.append((step, worker.run(step)))
            if len(under_way) < 2 and step.num_scheduled_tokens and draw.random() >= early:
                continue
        elif not under_way and not waiting and number > max(events, default=0):  # paused, it has none
            break
        if under_way:
            _tell(found, scheduler.update_from_output(*under_way.popleft()), at_end)
    else:
        raise AssertionError("the requests do not come to an end")
    return found


def _tell(found: Went, told: dict[int, Any], tells_at_end: bool) -> None:
    for of_client in told.values():
        stats = of_client.scheduler_stats
        if stats is not None and of_client.outputs:  # vLLM's engine counts no others
            found.queries += stats.prefix_cache_stats.queries
            found.hits += stats.prefix_cache_stats.hits
        for one in of_client.outputs:
            found.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
            if one.request_id.endswith(STREAMED) or not tells_at_end:
                found.told[one.request_id] = found.told.get(one.request_id, 0) + 1
            if one.finish_reason is not None:
                found.finish[one.request_id] = f"{one.finish_reason} {one.stop_reason}"


def drawn(seed: int) -> tuple[list[Asked], dict[int, str], dict[str, Any]]:
    """Requests, events and sizes by a seed: some share prompts, some have no room, some must be told of each step."""
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

    draw, asked = random.Random(seed), list[Asked]()
    for number in range(draw.randrange(1, 14)):
        prompt = [draw.randrange(2, 5) for _ in range(draw.randrange(1, 20))]
        if asked and draw.random() < 0.4:
            prompt = list(asked[-1].prompt)
        params = {"max_tokens": draw.randrange(1, LONGEST), "output_kind": RequestOutputKind.FINAL_ONLY}
        params |= draw.choice([{}, {"stop_token_ids": [3]}, {"ignore_eos": True}, {"min_tokens": 1}])
        name = f"{seed}/{number}"
        if draw.random() < 0.1:
            name = f"{name} {STREAMED}"
            params |= draw.choice(
                [
                    {"output_kind": RequestOutputKind.DELTA},
                    {"logprobs": 1},
                    {"prompt_logprobs": 1},
                    {"stop": ["words"]},
                    {"repetition_detection": RepetitionDetectionParams(max_pattern_size=1, min_count=2)},
                ]
            )
        at = asked[-1].at + draw.choice([0, 0, 0, 3, 30]) if asked else 0
        asked.append(Asked(name, at, prompt, params))
    events = {draw.randrange(1, 80): draw.choice(["abort", "forget"]) for _ in range(draw.randrange(4))}
    if draw.random() < 0.5:
        at = draw.randrange(2, 40)
        events |= {at: "pause", at + draw.randrange(1, 6): draw.choice(["abort", "forget"]), at + 8: "resume"}
    sizes = {
        "blocks": draw.choice([18, 20, 40, 400]),
        "budget": draw.choice([*range(3, 12), 64, 64, 64]),
        "caching": draw.random() < 0.8,
        "early": draw.choice([0.0, 0.0, 0.2]),
        "at_end": draw.random() < 0.7,
    }
    return asked, events, sizes


def pairs(seeds: Iterable[int]) -> Iterator[tuple[int, Went, Went]]:
    """Yield what vLLM's own scheduler comes to, and ours."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from quintet.rollout.vllm.scheduler import WholeScheduler

    class Mended(WholeScheduler):
        """vLLM's steps, without the fault that ours mends besides: see `test_scheduler`."""

        schedule, update_from_output = AsyncScheduler.schedule, AsyncScheduler.update_from_output

    for seed in seeds:
        asked, events, sizes = drawn(seed)
        yield seed, *(went(kind, asked, events, **sizes) for kind in (Mended, WholeScheduler))


def test_steps_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    steps = 0
    for seed, theirs, ours in pairs([*range(600), *RARE]):
        assert ours.steps == theirs.steps, seed
        assert ours.tokens == theirs.tokens, seed
        assert (ours.finish, ours.told) == (theirs.finish, theirs.told), seed
        assert (ours.queries, ours.hits) == (theirs.queries, theirs.hits), seed
        steps += len(ours.steps)
        assert ours.finish.keys() == {one.name for one in drawn(seed)[0]}, seed
    assert steps > 10_000
