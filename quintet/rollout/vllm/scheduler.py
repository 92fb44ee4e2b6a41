"""vLLM's scheduler on a GPU (`scheduler_cls`), by its length apart from `compat`. vLLM alone imports this."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class WholeScheduler(AsyncScheduler):
    """Schedule steps ahead, and lose no token of a request that is read anew.

    vLLM 0.20.2 throws the next token of each such request away, to get rid of one that is still under way: where none is, because all
    steps came to their end or the request's prompt was not read yet, that token is missing between two that were drawn with it
    (test_server.py::test_a_sleeping_cache_changes_no_sample, on a GPU).
    """

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache; all requests that run are read anew, if they are to be."""
        running = [(request, request.num_output_placeholders > 0) for request in self.running]
        emptied: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if reset_running_requests:
            for request, is_drawing in running:
                request.discard_latest_async_tokens = is_drawing
        return emptied

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take what a step came to. Of a step whose tokens are thrown away, what became of its drafts is too: vLLM 0.20.2 would take the
        rejected ones off what the request has read since."""
        drafted = scheduler_output.scheduled_spec_decode_tokens
        for name in list(drafted):
            request = self.requests.get(name)
            if request is not None and request.discard_latest_async_tokens:
                del drafted[name]
        return super().update_from_output(scheduler_output, model_runner_output)
