"""vLLM's scheduler on a GPU (`scheduler_cls`), by its length apart from `compat`. vLLM alone imports this.

vLLM 0.20.2 goes through every sequence of every step many times: with 512 of them that took 6 of a step's 10 ms, and the GPU waited.
Nearly all steps draw one token for each sequence that runs and end none: these are done here, to the same effect
(test_scheduled_steps.py, for vLLM on GPUs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager


class WholeScheduler(AsyncScheduler):
    """Schedule steps ahead, and lose no token of a request that is read anew.

    vLLM 0.20.2 throws the next token of each such request away, to get rid of one that is still under way: where none is, because all
    steps came to their end or the request's prompt was not read yet, that token is missing between two that were drawn with it
    (test_server.py::test_a_sleeping_cache_changes_no_sample, on a GPU).
    """

    tells_at_end = False
    """Whether tokens need not be told before a request is done: by who has the engine in its process, and looks at them no sooner."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        stages = self.parallel_config.pipeline_parallel_size
        # Of layers that drop keys, of stages, of drafts and where FLOPs are counted there is more to do in a step.
        self._simple = (
            self.use_v2_model_runner
            and [type(one) for one in managers] == [FullAttentionManager]
            and stages * self.dcp_world_size * self.pcp_world_size == 1
            and not (self.connector or self.ec_connector or self.is_encoder_decoder)
            and not (self.num_spec_tokens or self.perf_metrics)
        )
        self._block = int(managers[0].block_size)

    def add_request(self, request: Any) -> None:
        """Take a request. simple: whether nothing but its next token is to be thought of; ends: the tokens that may end it; waits: whether it
        is told of at its end alone; looked_at: of how many tokens vLLM must look at it, 0 where at any."""
        params, grammar = request.sampling_params, request.structured_output_request
        request.simple = grammar is None and not request.has_encoder_inputs and not request.resumable
        request.waits = (
            request.simple
            and params is not None
            and params.output_kind is RequestOutputKind.FINAL_ONLY
            and not params.stop
            and (params.logprobs, params.prompt_logprobs, params.repetition_detection) == (None, None, None)
        )
        request.ends = frozenset(params.all_stop_token_ids) if request.waits else frozenset()
        request.looked_at = request.told = 0
        super().add_request(request)

    # a step is scheduled

    def schedule(self) -> Any:
        """Return the next step."""
        drawing = self._drawing() if self._simple else []
        return self._one_token_each(drawing) if drawing else super().schedule()

    def _drawing(self) -> Sequence[Any]:
        """The requests that a token is drawn for next, where vLLM would come to these and nothing else; empty otherwise."""
        running, found, blocks = self.running, list[Any](), 0
        waiting = (self.waiting or self.skipped_waiting) and len(running) < self.max_num_running_reqs
        if (
            waiting
            or self._pause_state != PauseState.UNPAUSED
            or len(running) > self.max_num_scheduled_tokens
        ):
            return []
        for request in running:
            computed, under_way = request.num_computed_tokens, request.num_output_placeholders
            if under_way and computed + 2 - under_way >= request.num_prompt_tokens + request.max_tokens:
                continue  # its last token is under way
            reads = len(request._all_token_ids) + under_way - computed
            if reads != 1 or computed + 1 >= self.max_model_len or not request.simple:
                return []
            blocks += computed % self._block == 0
            found.append(request)
        return found if blocks <= self.kv_cache_manager.block_pool.get_num_free_blocks() else []

    def _one_token_each(self, requests: Sequence[Any]) -> SchedulerOutput:
        """The step that draws a token for each of these."""
        manager, names, blocks = self.kv_cache_manager, list[str](), list[Any]()
        manager.new_step_starts()
        for request in requests:
            if request.num_computed_tokens % self._block == 0:
                names.append(request.request_id)
                blocks.append(manager.allocate_slots(request, 1).get_block_ids(allow_none=True))
            elif not request.num_output_placeholders:  # else it was noted with a step under way
                manager.cache_blocks(request, request.num_computed_tokens + 1)
            request.num_computed_tokens += 1
            request.num_output_placeholders += 1
        manager.take_new_block_ids()  # which vLLM would keep a list of for ever
        # vLLM's second runner, which draws here, looks for new blocks alone.
        grown = replace(CachedRequestData.make_empty(), req_ids=names, new_block_ids=blocks)
        scheduled = dict.fromkeys([one.request_id for one in requests], 1)
        self.prev_step_scheduled_req_ids = set(scheduled)
        finished: set[str] = self.finished_req_ids
        self.finished_req_ids: set[str] = set()
        return replace(
            SchedulerOutput.make_empty(),
            scheduled_cached_reqs=grown,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=len(scheduled),
            num_common_prefix_blocks=[0],
            finished_req_ids=finished,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            preempted_req_ids=set(),
        )

    # and what it came to

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take what a step came to. Of a step whose tokens are thrown away, what became of its drafts is too: vLLM 0.20.2 would take the
        rejected ones off what the request has read since."""
        for name in list(drafted := scheduler_output.scheduled_spec_decode_tokens):
            if getattr(self.requests.get(name), "discard_latest_async_tokens", False):
                del drafted[name]
        if not (self.tells_at_end and self._simple):
            return super().update_from_output(scheduler_output, model_runner_output)
        left = self._go_on(scheduler_output.num_scheduled_tokens, model_runner_output)
        if scheduler_output.num_scheduled_tokens and not left:
            return {}  # of statistics alone its engine takes none
        requests = {name: self.requests[name] for name in left if name in self.requests}
        told = super().update_from_output(
            replace(scheduler_output, num_scheduled_tokens=left), model_runner_output
        )
        for of_client in told.values():
            for one in of_client.outputs:
                request = requests[one.request_id]
                one.new_token_ids = request._output_token_ids[request.told :]
                request.told += len(one.new_token_ids)
        for request in requests.values():
            # At its first token, and where it throws one away, vLLM must look again.
            if request.waits and request.prefill_stats is None and not request.discard_latest_async_tokens:
                request.looked_at = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return told

    def _go_on(self, scheduled: Mapping[str, int], made: Any) -> dict[str, int]:
        """Give the requests that go on their token, and tell nobody; returns the others, which vLLM is to look at."""
        stats = self.kv_cache_manager.prefix_cache_stats
        if made.logprobs or made.prompt_logprobs_dict or (stats is not None and stats.requests):
            return dict(scheduled)  # what is counted is told with what is told
        left, places, drawn = dict[str, int](), made.req_id_to_index, made.sampled_token_ids
        requests, block = self.requests, self._block
        for name, count in scheduled.items():
            request, tokens = requests.get(name), drawn[places[name]]
            if request is None or len(tokens) != 1:
                left[name] = count
                continue
            known, (token,) = request._all_token_ids, tokens
            length = len(known) + 1
            if length >= request.looked_at or token in request.ends:
                left[name] = count
                continue
            known.append(token)
            request._output_token_ids.append(token)
            if length % block == 0:
                request.update_block_hashes()
            request.num_output_placeholders -= 1
        return left

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache; all requests that run are read anew, if they are to be."""
        running = [(request, request.num_output_placeholders > 0) for request in self.running]
        emptied: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if reset_running_requests:
            for request, is_drawing in running:
                request.discard_latest_async_tokens = is_drawing
                request.looked_at = 0
        return emptied
