"""Generation back ends behind one protocol: native today, vLLM and SGLang by the same words."""

from quintet.rollout.base import Request, Rollout, Sample, Sampling

__all__ = ["Request", "Rollout", "Sample", "Sampling"]
