"""Generation back ends behind one protocol: native, vLLM and SGLang by the same words."""

from quintet.rollout.base import (
    Fingerprints,
    Part,
    Piece,
    Request,
    Rollout,
    Sample,
    Sampling,
    Wanted,
    WeightSource,
)

__all__ = [
    "Fingerprints",
    "Part",
    "Piece",
    "Request",
    "Rollout",
    "Sample",
    "Sampling",
    "Wanted",
    "WeightSource",
]
