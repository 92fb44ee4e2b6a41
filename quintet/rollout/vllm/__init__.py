"""Generation by vLLM."""

from quintet.rollout.vllm.rollout import VllmRollout

__all__ = ["VllmRollout"]
