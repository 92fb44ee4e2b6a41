"""vLLM's worker on a GPU (`worker_cls`), by its length apart from `compat`. vLLM alone imports this."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu_worker import Worker

from quintet.engine.head import log_probs_of
from quintet.rollout.vllm.captured_steps import CapturedSteps, Drawn, can_be_captured
from quintet.rollout.vllm.token_store import TokenStore, store_of


class StoringWorker(Worker):
    """Compute as vLLM's own worker does, and write down log-probs and routes of tokens.

    vLLM 0.20.2 tells no routes in its second model runner, and log-probs token by token, through Python (test_routes.py, test_offline.py,
    on a GPU).
    """

    _store: TokenStore
    _logprobs: Tensor
    _more = True
    """Whether the step has requests that are new."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the KV cache, and listen to routers and sampler before graphs are captured."""
        super().initialize_from_config(kv_cache_config)
        runner: Any = self.model_runner
        routes = bool(self.vllm_config.additional_config.get("routes"))
        first = self.rank % self.parallel_config.tensor_parallel_size == 0
        self._store = store_of(runner, kv_cache_config.kv_cache_groups, routes=routes, tells=first)
        sampler = runner.sampler
        sample, processed = sampler.sample, sampler.logprobs_mode == "processed_logprobs"
        draw, write = runner.sample, sampler.apply_staged_writes

        def sample_and_keep(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            drawn: tuple[Tensor, Tensor] = sample(logits, *args)
            self._logprobs = log_probs_of(drawn[1] if processed else logits, drawn[0])
            return drawn

        def draw_and_store(hidden: Tensor, batch: Any, grammar: Any) -> Drawn:
            drawn: Drawn = draw(hidden, batch, grammar)
            self._store.end_draw(batch.logits_indices, self._logprobs)
            return drawn

        def write_where_new() -> None:
            if self._more:
                write()

        sampler.sample, runner.sample = sample_and_keep, draw_and_store
        sampler.apply_staged_writes = write_where_new

    def compile_or_warm_up_model(self) -> Any:
        """Compile and capture, whole steps of few sequences too."""
        told = super().compile_or_warm_up_model()
        if can_be_captured(self.model_runner):
            CapturedSteps(self.model_runner).capture()
        return told

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any) -> Any:
        """Compute a step."""
        self._store.begin_step(scheduler_output)
        self._more = bool(scheduler_output.scheduled_new_reqs)
        made = super().execute_model(scheduler_output)
        self._store.end_forward(scheduler_output.total_num_scheduled_tokens)
        return made
