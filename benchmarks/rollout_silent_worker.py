"""vLLM's worker on a GPU for `rollout_silent`. vLLM alone imports this."""

from __future__ import annotations

from typing import Any

from quintet.rollout.vllm.gpu_worker import StoringWorker


class SilentWorker(StoringWorker):
    """Compute as quintet's worker does, its captured steps among it, and draw tokens by vLLM's own functions, which take no log-probs."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the KV cache, and take back what listens to the draw before graphs are captured."""
        super().initialize_from_config(kv_cache_config)
        runner: Any = self.model_runner
        del runner.sample, runner.sampler.sample  # what stands before the classes' own
