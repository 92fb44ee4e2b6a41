"""Seconds of a call on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds and result of a call that begins when the device has nothing to do, and ends when it has done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    result = call()
    wait()
    return time.perf_counter() - began, result
