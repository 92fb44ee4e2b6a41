"""The scheduler that vLLM makes on GPUs where it tells routes (`scheduler_cls`). vLLM alone imports this."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler

from quintet.rollout.vllm.routes import KeepsFirstRoutes


class FirstRoutesScheduler(KeepsFirstRoutes, Scheduler):
    """vLLM's own, which tells the routes of each token's first forward."""
