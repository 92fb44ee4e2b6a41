"""Generation with the engine's own model definition: the embedded default."""

from quintet.rollout.native.rollout import NativeRollout

__all__ = ["NativeRollout"]
