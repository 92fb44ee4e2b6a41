"""Seconds of a call on a device, and how fast the host asks for work."""

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


def launch_us(device: torch.device, launches: int = 5000) -> float:
    """Microseconds from one launch of a kernel to the next, as this process's host gives them: it tells a slow host from a fast one."""
    one = torch.zeros(1, device=device)

    def several() -> None:
        for _ in range(launches):
            one.add_(1)

    several()  # the first loads the kernel
    return 1e6 * timed(several, device)[0] / launches
