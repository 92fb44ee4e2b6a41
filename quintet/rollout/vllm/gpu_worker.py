"""vLLM's worker on a GPU where routes are asked for (`worker_cls`). vLLM alone imports this."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from quintet.rollout.vllm.slot_routes import SlotRoutes, of_worker


class RoutesWorker(Worker):
    """vLLM's own, which writes down the routes of requests (vLLM 0.20.2 tells none in its second model runner; test_routes.py, on a
    GPU)."""

    _routes_heard: SlotRoutes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the KV cache, and listen to the routers before their graphs are captured."""
        super().initialize_from_config(kv_cache_config)
        runner = self.model_runner
        self._routes_heard = of_worker(runner, runner.get_model(), kv_cache_config.kv_cache_groups)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any) -> Any:
        """Compute a step, and put its routes in their places."""
        self._routes_heard.begin_step(scheduler_output)
        made = super().execute_model(scheduler_output)
        self._routes_heard.end_step(scheduler_output.total_num_scheduled_tokens)
        return made
