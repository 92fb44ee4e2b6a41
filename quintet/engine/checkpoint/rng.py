"""Random states of one process: torch's on the CPU and on its GPU, and Python's."""

from __future__ import annotations

import random
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Return the states of all random number generators, as JSON can hold them."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": _text(torch.get_rng_state())}
    if torch.cuda.is_available():
        states["cuda"] = _text(torch.cuda.get_rng_state())
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Undo all drawing since `random_states`. A GPU's state stays where there is none, or was none."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_tensor(states["torch"]))
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]))


def _text(state: torch.Tensor) -> str:
    return bytes(state.numpy()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
