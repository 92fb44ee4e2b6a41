"""Generation by SGLang: see quintet.rollout.sglang.rollout."""

from quintet.rollout.sglang.rollout import SglangRollout

__all__ = ["SglangRollout"]
